"""core_conformance/runner/{lanes,scheduling}.py: processes lost between and within cases, cases spread over lanes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from core.errors import DeviceUnavailableError
from core_conformance.case import CaseInfo
from core_conformance.outcome import Outcome
from core_conformance.runner import lanes, session
from core_conformance.runner.lanes import WORKER, Opening, ProcessLane
from core_conformance.runner.progress import Progress
from core_conformance.runner.protocol import WorkerOptions
from core_conformance.runner.scheduling import run_all
from core_conformance.runner.session import Options, run
from tests.host.test_probing import is_running
from tests.support import break_torch

# Answers as core_conformance.runner.lane_worker does, without torch. What opening and each case do is code in the
# device's name and in the case's id; `starts` is how many processes there were before.
LIGHT = """
import os, signal, sys, threading, time
from pathlib import Path
from core_conformance.outcome import Outcome
from core_conformance.case import CaseInfo
from core_conformance.runner.protocol import Collected, WorkerOptions

mark = Path(__file__).with_suffix(".starts")
starts = len(mark.read_text()) if mark.exists() else 0
mark.write_text("x" * (starts + 1))

def opened():
    with Path(__file__).with_suffix(".opened").open("a") as file:
        file.write("x")

def answer(request):
    if request.get("collect") == "host":
        cases = (CaseInfo(id="host/pass", what="", opens=False),)
        return Collected(cases=cases, name="light", environment=PLACE).to_json()
    if "collect" in request:
        exec(WorkerOptions.from_argument(request["options"]).device)
        cases = (CaseInfo(id="host/pass", what=""), CaseInfo(id="ops/time.sleep(60)", what=""))
        return Collected(cases=cases, name="light", environment=PLACE).to_json()
    names = {**globals(), "status": "pass", "usable": True}
    exec(request["run"].partition("/")[2], names)
    outcome = Outcome(id=request["run"], status=names["status"], notes=(str(os.getpid()), f"{request['timeout_s']:g}"))
    return {"outcome": outcome.to_json(), "usable": names["usable"]}

PLACE = dict(device_name="", capabilities={}, versions={}, driver="", platform="", workers=1, threads=1)
"""


@pytest.fixture(autouse=True)
def _light_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "light_worker.py").write_text(LIGHT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lanes, "WORKER", "light_worker")
    monkeypatch.setattr(session, "check_name", lambda name: None)  # of the light worker's devices no plugin knows
    yield
    sys.modules.pop("light_worker", None)


def num_starts(tmp_path: Path) -> int:
    return len((tmp_path / "light_worker.starts").read_text())


def info(code: str = "pass", **fields: Any) -> CaseInfo:
    return CaseInfo(id=f"ops/{code}", what="", **fields)


def test_one_process_runs_case_after_case(tmp_path: Path) -> None:
    with closing(ProcessLane(WorkerOptions(device="pass", timeout_factor=3))) as lane:
        assert [case.id for case in lane.collect().cases] == ["host/pass", "ops/time.sleep(60)"]
        outcomes = [lane.run(info()), lane.run(info(timeout_s=7.0))]
    assert [outcome.status for outcome in outcomes] == ["pass", "pass"]
    assert outcomes[0].notes[0] == outcomes[1].notes[0] and num_starts(tmp_path) == 1
    assert [outcome.notes[1] for outcome in outcomes] == ["360", "21"]
    assert not is_running(int(outcomes[0].notes[0]))


def test_a_process_with_a_broken_device_is_replaced(tmp_path: Path) -> None:
    with closing(ProcessLane(WorkerOptions(device="pass"))) as lane:
        broken, after = lane.run(info("usable, status = False, 'fail'")), lane.run(info())
    assert (broken.status, after.status) == ("fail", "pass")
    assert broken.notes[0] != after.notes[0] and len(after.notes) == 2


@pytest.mark.slow
def test_an_end_between_two_cases_is_told_with_the_later_one() -> None:
    # Nobody can tell which of the cases is to blame.
    with closing(ProcessLane(WorkerOptions(device="pass"))) as lane:
        ends = "threading.Thread(target=lambda: [time.sleep(0.2), os._exit(5)]).start()"
        before = lane.run(info(ends))
        assert before.status == "pass"
        time.sleep(0.1)
        assert not is_running(int(before.notes[0]))
        after = lane.run(info())
        assert after.status == "pass"
        assert after.notes[2] == f"before it, the process ended with exit code 5 when ops/{ends} was over"
        assert len(lane.run(info()).notes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opening", "problem"),
    [
        ("print('firmware dump'); os.abort()", "crashed with SIGABRT"),
        ("print('firmware dump'); time.sleep(60)", "gave no answer within 1.5 s and was killed"),
    ],
)
def test_level_0_is_left_where_opening_takes_the_process_down(opening: str, problem: str) -> None:
    options = Options(device=opening.replace("')", "', flush=True)"), timeout_factor=0.005, in_process=False)
    report = run(options)
    assert [(outcome.id, outcome.status) for outcome in report.outcomes] == [("host/pass", "pass")]
    assert (
        f"could not be collected: the process that opened the device and listed them {problem}" in report.obstacles[0]
    )
    with closing(ProcessLane(WorkerOptions(device=options.device, timeout_factor=0.005))) as lane:
        collected = lane.collect()
        assert collected.error is not None and "firmware dump" in collected.detail
        assert lane.run(info("os.abort()", opens=False)).status == "crash"
        assert lane.run(info(opens=False)).status == "pass", "level 0 opens nothing, in a new process too"


@pytest.mark.slow
def test_a_device_that_hangs_when_it_is_opened_is_opened_once(tmp_path: Path) -> None:
    options = WorkerOptions(device="opened()\ntime.sleep(60)", timeout_factor=0.02)
    opening = Opening()
    with (
        closing(ProcessLane(options, opening=opening)) as first,
        closing(ProcessLane(options, opening=opening)) as other,
    ):
        assert first.collect().error is not None
        wanted = [info("pass"), info("pass", opens=False), info("pass")]
        outcomes = [*map(first.run, wanted), other.run(info("pass"))]
    assert [outcome.status for outcome in outcomes] == ["timeout", "pass", "skip", "skip"]
    assert outcomes[0].reason.startswith("the process that opened the device and listed the cases gave no answer")
    assert outcomes[3].reason == "not run: the device hung when it was opened, for which ops/pass is judged"
    assert len((tmp_path / "light_worker.opened").read_text()) == 1


@pytest.mark.slow
def test_a_device_that_hangs_when_it_is_opened_again_ends_the_run_of_its_lane(tmp_path: Path) -> None:
    # Looked at when a process is needed: a lane whose process lives goes on.
    options = WorkerOptions(device="opened()\nstarts and time.sleep(60)", timeout_factor=0.02)
    opening = Opening()
    with closing(ProcessLane(options, opening=opening)) as lane:
        assert lane.collect().error is None
        outcomes = [lane.run(info(code)) for code in ("os._exit(3)", "pass", "pass")]
    assert [outcome.status for outcome in outcomes] == ["crash", "timeout", "skip"]
    assert len((tmp_path / "light_worker.opened").read_text()) == 2


@pytest.mark.slow
def test_a_device_that_does_not_open_again_costs_no_time_for_each_case(tmp_path: Path) -> None:
    with closing(ProcessLane(WorkerOptions(device="starts and os.abort()"))) as lane:
        assert lane.collect().error is None
        outcomes = [lane.run(info(code)) for code in ("os._exit(3)", "pass", "pass", "pass", "pass")]
    assert [outcome.status for outcome in outcomes] == ["crash"] * 5
    assert outcomes[1].reason == "a new process for it could not open the device: it crashed with SIGABRT"
    assert outcomes[4].reason == "not run: 2 new processes in a row could not open the device"
    assert {outcome.id for outcome in outcomes} == {"ops/os._exit(3)", "ops/pass"}
    assert num_starts(tmp_path) == 3


def test_an_interruption_kills_the_workers_and_goes_through() -> None:
    pids: list[int] = []

    class Interrupting(Progress):
        def collected(self, cases: Sequence[CaseInfo]) -> None:
            assert [case.id for case in cases] == ["host/pass", "ops/time.sleep(60)"]

        def finished(self, outcome: Outcome) -> None:
            pids.append(int(outcome.notes[0]))
            time.sleep(0.2)
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(Options(device="pass"), Interrupting())
    assert time.monotonic() - start < 30
    assert len(pids) == 1 and not is_running(pids[0])


class FakeLane:
    """Runs nothing; notes the order, and takes its time for cases of subject `slow`."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.closed = False

    def collect(self) -> Any:
        raise AssertionError

    def run(self, case: CaseInfo) -> Outcome:
        time.sleep(0.05 if "slow" in case.id else 0.001)
        self.ran.append(case.id)
        return Outcome(id=case.id, status="pass")

    def close(self) -> None:
        self.closed = True


def infos(*ids: str) -> list[CaseInfo]:
    return [CaseInfo(id=id, what="") for id in ids]


def test_blocks_stay_together_and_an_idle_lane_helps_out() -> None:
    slow, quick = [f"ops/slow/{n}" for n in range(20)], [f"ops/quick-{n % 4}/{n}" for n in range(12)]
    lanes = [FakeLane(), FakeLane()]
    done: list[str] = []
    run_all(lanes, infos(*slow, *sorted(quick)), lambda outcome: done.append(outcome.id))
    assert sorted(done) == sorted([*slow, *quick])
    busy, helper = sorted(lanes, key=lambda lane: sum("quick" in id for id in lane.ran))
    assert not [id for id in busy.ran if "quick" in id], "the lane in the long block has no time for others"
    assert helper.ran[:12] == sorted(quick)
    # Halves are taken from the back, in order, and again when they are used up.
    assert 8 <= sum("slow" in id for id in helper.ran) <= 12
    # The last of a half may be taken back by whoever is done first, which a busy machine decides.
    assert busy.ran[:8] == slow[:8]
    assert [lane.closed for lane in lanes] == [False, True]


def test_a_fault_in_a_lane_ends_the_run() -> None:
    class Faulty(FakeLane):
        def run(self, case: CaseInfo) -> Outcome:
            raise ZeroDivisionError

    lanes = [FakeLane(), Faulty()]
    with pytest.raises(ZeroDivisionError):
        run_all(lanes, infos(*(f"ops/slow-{n}/x" for n in range(50))), lambda outcome: None)
    assert all(lane.closed for lane in lanes) and len(lanes[0].ran) < 50


def test_the_case_that_takes_longest_is_told_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()

    class Waited(FakeLane):
        def run(self, case: CaseInfo) -> Outcome:
            assert told.wait(60.0) or case.id != "ops/long/x"
            return super().run(case)

    def waiting(case_id: str, elapsed_s: float) -> None:
        assert case_id in ("ops/long/x", "ops/quick/x") and elapsed_s > 0
        if case_id == "ops/long/x":
            told.set()

    monkeypatch.setattr("core_conformance.runner.scheduling.WAIT_S", 0.01)
    done: list[str] = []
    run_all([Waited()], infos("ops/long/x", "ops/quick/x"), lambda outcome: done.append(outcome.id), waiting)
    assert told.is_set() and done == ["ops/long/x", "ops/quick/x"]


@pytest.mark.slow
def test_a_backend_that_breaks_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "WORKER", WORKER)
    break_torch(tmp_path, monkeypatch)
    with pytest.raises(DeviceUnavailableError, match="torch_dev is installed and fails: libdev") as caught:
        run(Options(device="cpu", in_process=False, chosen=("host/*",)))
    assert caught.value.asked == "device 'cpu'" and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in caught.value.remedy
