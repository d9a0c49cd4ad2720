"""core/host/workers/worker.py: a worker that answers request after request, and everything its code can do to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.host.workers.worker import Asked, PersistentWorker, WorkerResult, ask_once
from tests.host.test_probing import is_running

# Runs the Python text of each request; what it leaves under the name `answer` goes back.
SOURCE = """
import ctypes, json, os, signal, subprocess, sys, threading, time

kept = {}

def answer(request):
    names = {**globals(), "asked": request, "answer": {}}
    exec(request["do"], names)
    return {"pid": os.getpid(), **names["answer"]}
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PersistentWorker]:
    (tmp_path / "obedient_worker.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with PersistentWorker("obedient_worker", {"argument": "an argument"}, AN_OWN_VARIABLE="its value") as made:
        yield made


def do(worker: PersistentWorker, code: str, timeout_s: float = 20.0) -> WorkerResult:
    return worker.request({"do": code}, timeout_s=timeout_s)


def answered(worker: PersistentWorker, code: str = "pass") -> dict[str, Any]:
    result = do(worker, code)
    assert result.answer is not None and result.problem == "", result
    return result.answer


def test_one_process_answers_all_requests(worker: PersistentWorker) -> None:
    assert not worker.running
    first = answered(worker, "kept['x'] = 1; answer = {**kept, 'own': os.environ['AN_OWN_VARIABLE'], **asked}")
    second = answered(worker, "kept['x'] += 1; answer = dict(kept)")
    assert worker.running
    assert (first["argument"], first["own"], first["x"], second["x"]) == ("an argument", "its value", 1, 2)
    assert first["pid"] == second["pid"] != os.getpid()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("os.abort()", "crashed with SIGABRT"),
        ("os._exit(7)", "ended with exit code 7 and no answer"),
        ("os._exit(0)", "ended with exit code 0 and no answer"),
        ("1 / 0", "ended with exit code 1 and no answer"),
        ("answer = {'x': object()}", "ended with exit code 1 and no answer"),
        ("os.closerange(3, 4096)", "ended with exit code 1 and no answer"),
    ],
)
def test_a_lost_process_is_told_and_replaced(worker: PersistentWorker, code: str, problem: str) -> None:
    before = answered(worker)["pid"]
    result = do(worker, f"print('before the end', flush=True); {code}")
    assert (result.answer, result.problem, result.timed_out) == (None, problem, False)
    assert "before the end" in result.output
    assert answered(worker)["pid"] != before


def test_a_crash_leaves_the_stack_in_the_output(worker: PersistentWorker) -> None:
    result = do(worker, "ctypes.string_at(0)")
    assert result.problem == "crashed with SIGSEGV"
    assert "Segmentation fault" in result.output and "obedient_worker.py" in result.output


@pytest.mark.slow
def test_a_hang_is_killed_at_its_deadline_with_its_children(worker: PersistentWorker, tmp_path: Path) -> None:
    answered(worker)
    start = time.monotonic()
    result = do(
        worker,
        f"child = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid));"
        "print('hanging', flush=True); time.sleep(60)",
        timeout_s=1.0,
    )
    assert time.monotonic() - start < 5
    assert result.timed_out and result.problem == "gave no answer within 1 s and was killed"
    assert "hanging" in result.output
    assert not is_running(int((tmp_path / "pid").read_text()))
    answered(worker)


def test_a_crash_is_seen_at_once_though_a_child_holds_the_channel(worker: PersistentWorker) -> None:
    answered(worker)
    start = time.monotonic()
    result = do(worker, "os.fork() or time.sleep(60); os.kill(os.getpid(), signal.SIGKILL)")
    assert result.problem == "crashed with SIGKILL"
    assert time.monotonic() - start < 5


def test_what_is_printed_stays_off_the_channel_and_with_its_request(worker: PersistentWorker) -> None:
    code = "print('{\"request\": 1}'); os.write(1, b'descriptor 1\\n'); ctypes.CDLL(None).dprintf(1, b'from C\\n')"
    result = do(worker, code)
    assert result.answer is not None
    assert all(text in result.output for text in ('{"request": 1}', "descriptor 1", "from C"))
    assert do(worker, "print('second')").output == "second\n"
    assert do(worker, "pass").output == ""


def test_megabytes_printed_block_nobody_and_leave_their_tail(worker: PersistentWorker) -> None:
    result = do(worker, "sys.stderr.write('x' * 5_000_000); print('the end')")
    assert result.answer is not None
    assert result.output.endswith("xthe end\n") and len(result.output) < 20_000


def test_printing_between_requests_blocks_nobody(worker: PersistentWorker) -> None:
    code = "threading.Thread(target=lambda: [time.sleep(0.1), os.write(2, b'y' * 300_000), kept.update(d=1)]).start()"
    answered(worker, code)
    time.sleep(0.3)
    assert answered(worker, "while 'd' not in kept: time.sleep(0.01)")


def test_long_requests_and_answers_pass(worker: PersistentWorker) -> None:
    text = "z" * 1_000_000
    assert answered(worker, f"answer = {{'text': '{text}'}}")["text"] == text


@pytest.mark.parametrize("place", ["os.fork()", "os.fork() or time.sleep(0.3)", "os.fork() and time.sleep(0.3)"])
def test_a_worker_that_forks_answers_once(worker: PersistentWorker, place: str) -> None:
    before = answered(worker)["pid"]
    assert answered(worker, place)["pid"] == before
    assert answered(worker, "answer = {'x': 1}") == {"pid": before, "x": 1}


@pytest.mark.parametrize("code", ["os.close(0)", "sys.stdin.close()", "print(repr(sys.stdin.read()))", "os.close(1)"])
def test_the_standard_streams_are_the_codes_own(worker: PersistentWorker, code: str) -> None:
    before = answered(worker)["pid"]
    answered(worker, code)
    assert answered(worker)["pid"] == before


@pytest.mark.parametrize("code", ["sys.stdout = None", "sys.stdout.close()", "sys.stderr = 3"])
def test_standard_output_may_be_gone(worker: PersistentWorker, code: str) -> None:
    before = answered(worker)["pid"]
    answered(worker, code)
    assert answered(worker)["pid"] == before


WRITE_TO_ALL = """
for descriptor in range(3, 1024):
    try:
        os.write(descriptor, {data!r})
    except OSError:
        pass
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "data",
    [
        b"garbage\n",
        b"garbage",
        b"{}\n",
        b'{"request": 2, "answer": {"x": 1}}\n',
        b'{"request": 1, "answer": {}}\n',
        b"\xff\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_foreign_line_on_the_channel_never_becomes_an_answer(worker: PersistentWorker, data: bytes) -> None:
    before = answered(worker)["pid"]
    result = do(worker, WRITE_TO_ALL.format(data=data))
    assert (result.answer, result.problem) == (None, "sent something else than an answer")
    assert answered(worker)["pid"] != before


def test_a_process_that_ends_between_requests_is_told_and_replaced(worker: PersistentWorker) -> None:
    assert worker.lost() == ""
    answered(worker, "threading.Thread(target=lambda: [time.sleep(0.1), os._exit(5)]).start()")
    deadline = time.monotonic() + 5
    while not (lost := worker.lost()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert lost == "ended with exit code 5" and not worker.running
    assert worker.lost() == ""
    answered(worker)


@pytest.mark.slow
def test_closing_from_another_thread_ends_a_request(worker: PersistentWorker) -> None:
    pid = answered(worker)["pid"]
    results: list[WorkerResult] = []
    thread = threading.Thread(target=lambda: results.append(do(worker, "time.sleep(60)", timeout_s=60)))
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    worker.close()
    thread.join(5)
    assert not thread.is_alive() and time.monotonic() - start < 3
    assert (results[0].answer, results[0].problem) == (None, "was stopped")
    assert not is_running(pid)
    assert do(worker, "pass").problem == "was stopped"
    worker.close()


def test_an_ended_parent_takes_its_worker_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "obedient_worker.py").write_text(SOURCE)
    parent = (
        f"import os, sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\n"
        "from core.host.workers.worker import PersistentWorker\n"
        "print(PersistentWorker('obedient_worker').request({'do': ''}, timeout_s=20).answer['pid'], flush=True)\n"
        "os._exit(0)"
    )
    run = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True, timeout=30)
    assert not is_running(int(run.stdout))


def test_a_process_that_does_not_start_is_a_result() -> None:
    with PersistentWorker("no_such_module_anywhere") as worker:
        result = do(worker, "pass")
    assert result.problem == "ended with exit code 1 and no answer" and "no_such_module_anywhere" in result.output


def test_the_start_counts_as_time(worker: PersistentWorker) -> None:
    assert do(worker, "pass", timeout_s=0.0).timed_out
    answered(worker)


def test_a_worker_asked_once_is_gone_with_its_children(worker: PersistentWorker) -> None:
    code = "answer = {'child': subprocess.Popen(['sleep', '60']).pid}"
    result = ask_once("obedient_worker", {"do": code}, timeout_s=20)
    assert result.answer is not None
    assert not is_running(result.answer["pid"]) and not is_running(result.answer["child"])


@pytest.mark.slow
def test_workers_asked_together_answer_each_for_itself(worker: PersistentWorker) -> None:
    with Asked() as asked:
        asked.ask("good", "obedient_worker", do="answer = {'x': 1}", timeout_s=20)
        asked.ask("lost", "obedient_worker", do="os.abort()", timeout_s=20)
        asked.ask("late", "obedient_worker", do="time.sleep(60)", timeout_s=1)
        results = asked.results()
    assert results["good"].answer is not None and results["good"].answer["x"] == 1
    assert results["lost"].problem == "crashed with SIGABRT" and not results["lost"].timed_out
    assert results["late"].timed_out


def test_leaving_workers_that_were_asked_together_ends_them(worker: PersistentWorker, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    with Asked() as asked:
        for place in places:
            code = f"open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
            asked.ask(place.name, "obedient_worker", do=code, timeout_s=60)
        while not all(place.exists() and place.read_text() for place in places):
            time.sleep(0.02)
    assert not any(is_running(int(place.read_text())) for place in places)
