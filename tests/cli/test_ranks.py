"""`--tp`: ranks end together, whatever one of them does, and one message names rank, phase and reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.cli import ranks
from core.errors import UsageError
from tests.support import refused

PLANTED = """
import os, signal, sys, threading, time
rank, phase, fault = os.environ["PLANTED"].split()
def fail(*_):
    raise (MemoryError if fault == "memory" else RuntimeError)("planted")
def watch():
    file = os.path.join(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), "phase")
    while not os.path.exists(file) or open(file).read() != phase:
        time.sleep(0.02)
    number = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}.get(fault, signal.SIGUSR1)
    os.kill(os.getpid(), number)
if os.environ.get("RANK") == rank:
    if fault == "reordered":
        import core.compilation.rewriting as rewriting
        order = tuple(reversed(rewriting.COMMON_PASSES))
        rewriting.COMMON_PASSES = tuple(each for each in order if each.name != "lift_rotary")
    else:
        signal.signal(signal.SIGUSR1, fail)
        threading.Thread(target=watch, daemon=True).start()
"""


def command(tmp_path: Path, fault: str, *options: str) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    path = os.pathsep.join([str(tmp_path), *(each or os.getcwd() for each in sys.path)])
    quick = ("--device", "cpu", "--mode", "off", "--max-new-tokens", "200", "--no-check", "--tp", "2", "--json")
    environment = {**os.environ, "PYTHONPATH": path, "PLANTED": fault, "TMPDIR": str(tmp_path / "made")}
    (tmp_path / "made").mkdir()
    return [sys.executable, "-P", "-m", "core", "run", *quick, *options], environment


def started_by(tmp_path: Path) -> list[int]:
    """Return the processes that still run with the environment of this test."""
    mark, found = f"TMPDIR={tmp_path / 'made'}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def ended(tmp_path: Path, fault: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and JSON, once it is sure that nothing of it is left."""
    arguments, environment = command(tmp_path, fault, *options)
    done = subprocess.run(arguments, env=environment, capture_output=True, timeout=240, text=True)
    assert started_by(tmp_path) == [] and list((tmp_path / "made").glob("core-ranks-*")) == []
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    code, found = ended(tmp_path, "none - -", "--check")
    assert code == 0 and found["ranks"]["size"] == 2
    assert found["check"]["passed"] and found["check"]["tokens_equal"] and found["check"]["verdict"]["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("1 load killed", "rank 1 crashed with SIGKILL in phase load"),
        ("0 serve killed", "rank 0 crashed with SIGKILL in phase serve"),
        ("1 capture raised", "rank 1 failed in phase capture: RuntimeError: planted"),
        ("1 serve memory", "rank 1 ran out of memory in phase serve: MemoryError: planted"),
        ("1 serve hung", "rank 1 hung in phase serve: rank 0 waited in vain"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(tmp_path: Path, fault: str, found: str) -> None:
    if fault.startswith("0") or fault.endswith("killed"):
        code, document = ended(tmp_path, fault)
    else:
        code, document = ended(tmp_path, fault, "--tp-timeout", "10")
    assert code == 2 and document["error"]["found"].startswith(found)


@pytest.mark.slow
def test_ranks_whose_passes_differ_are_refused_by_name(tmp_path: Path) -> None:
    code, document = ended(tmp_path, "1 - reordered")
    assert code == 2 and "what to compile" in document["error"]["asked"]
    assert "order of passes" in document["error"]["found"] and "lift_rotary" in document["error"]["found"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    arguments, environment = command(tmp_path, "none - -")
    running = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(started_by(tmp_path)) < 3:
        assert running.poll() is None
    running.send_signal(number)
    assert running.wait(60) == (130 if number == signal.SIGINT else 143)
    assert started_by(tmp_path) == [] and list((tmp_path / "made").glob("core-ranks-*")) == []


# --- one process


def test_one_rank_is_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.run_on_ranks(None, 300) is None and ranks.run_on_ranks(1, 300) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.run_on_ranks(None, 300) is None and ranks.run_on_ranks(4, 300) is None


def test_a_launcher_and_the_option_may_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with refused(UsageError, "--tp 2", "one of 4 ranks"):
        ranks.run_on_ranks(2, 300)


def test_adapters_are_refused() -> None:
    with refused(UsageError, "--lora with 2 ranks"):
        ranks.run_on_ranks(2, 300, lora=["a=folder"])


def test_a_draft_model_is_refused() -> None:
    with refused(UsageError, "--draft-model with 2 ranks"):
        ranks.run_on_ranks(2, 300, draft_model="x")
