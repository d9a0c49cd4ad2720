"""core_conformance/runner/session.py and what it runs on: every status, in worker processes and in this one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import DeviceUnavailableError, UnknownDeviceError, UsageError
from core_conformance.case import AREAS, CaseInfo
from core_conformance.outcome import Outcome
from core_conformance.report.report import Report
from core_conformance.runner.protocol import Collected, SuiteModules, WorkerOptions
from core_conformance.runner.session import CASES_PER_WORKER, Options, list_chosen, run
from core_conformance.runner.worker import Session
from tests.conformance.suites import InstallSuite, noted, write_suite
from tests.host.test_probing import is_running
from tests.support import refused

InstallVendor = Callable[..., Any]

EVERYTHING = """
def fails(trial):
    trial.require(False, "the first\\nfinding")
    trial.require(False, "the second finding")
    trial.record("value", "T1", 0.5)

def raises(trial):
    raise ValueError("no such\\n  luck")

def fails_and_raises(trial):
    trial.require(False, "a finding")
    raise NotSupported("too late")

def unsupported(trial):
    raise NotSupported("its condition refuses")

def skips(trial):
    raise Skip("no compiler here")

def crashes(trial):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(trial):
    print("hanging now", flush=True)
    time.sleep(60)

def prints(trial):
    print("x" * 3_000_000)
    os.write(1, b'{"request": 0}\\n')

def forks(trial):
    told(trial)
    if os.fork() == 0:
        time.sleep(0.2)

def alone(trial):
    told(trial)
    time.sleep(0.1)
    trial.note(f"end {time.monotonic()}")

def leaves(trial):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)

def finds(trial):
    told(trial)
    trial.require(torch.get_default_dtype() == torch.float32 and not torch.is_grad_enabled(), "it is left changed")
    trial.require(not torch.is_inference_mode_enabled(), "in inference mode")

def draws(trial):
    trial.note(f"drew {torch.rand(1).item()}")

def collect(device, profile):
    yield case("torch/a/1", alone, exclusive=True)
    for number in range(12):
        yield case(f"ops/many-{number % 6}/{number}", told)
    yield case("ops/fails", fails)
    yield case("ops/raises", raises)
    yield case("ops/fails-and-raises", fails_and_raises)
    yield case("ops/exits", lambda trial: sys.exit(3))
    yield case("ops/unsupported", unsupported)
    yield case("ops/declared", fails, not_supported="dtype int1 is not declared")
    yield case("ops/skips", skips)
    yield case("ops/prints", prints)
    yield case("ops/leaves/1", leaves)
    yield case("ops/leaves/2", finds)
    yield case("ops/draws/1", draws)
    yield case("ops/draws/2", draws)
    if device.name == "cpu":
        yield case("ops/forks", forks)
        yield case("graphs/crashes/1", crashes)
        yield case("graphs/crashes/2", told)
        yield case("graphs/hangs", hangs, timeout_s=1.0)
    yield case("models/a/1", alone, exclusive=True)
    yield case("fuzz/a", lambda trial: trial.note(f"fuzz {trial.fuzz}"))
"""


class Watch:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.cases: list[str] = []
        self.ids: list[str] = []

    def collected(self, cases: Sequence[CaseInfo]) -> None:
        self.cases = [case.id for case in cases]

    def finished(self, outcome: Outcome) -> None:
        self.ids.append(outcome.id)

    def waiting(self, case_id: str, elapsed_s: float) -> None:
        assert case_id in self.cases and case_id not in self.ids and elapsed_s > 0


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuiteModules]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_suite(tmp_path_factory.mktemp("suite"), monkeypatch, EVERYTHING)


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def report(everything: SuiteModules, watch: Watch) -> Report:
    return run(Options(device="cpu", workers=2, fuzz=3, seed=11, suite=everything), watch)


@pytest.fixture(scope="module")
def outcomes(report: Report) -> dict[str, Outcome]:
    return {outcome.id: outcome for outcome in report.outcomes}


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallSuite:
    return lambda source: write_suite(tmp_path, monkeypatch, source)


@pytest.mark.parametrize(
    ("id", "status", "reason"),
    [
        ("host/one", "pass", ""),
        ("ops/fails", "fail", "the first finding (and 1 more)"),
        ("ops/raises", "fail", "ValueError: no such luck ("),
        ("ops/fails-and-raises", "fail", "a finding"),
        ("ops/exits", "fail", "SystemExit: 3 ("),
        ("ops/unsupported", "not-supported", "its condition refuses"),
        ("ops/declared", "not-supported", "dtype int1 is not declared"),
        ("ops/skips", "skip", "no compiler here"),
        ("ops/prints", "pass", ""),
        ("ops/forks", "pass", ""),
        ("ops/leaves/1", "pass", ""),
        ("ops/leaves/2", "pass", ""),
        ("graphs/crashes/1", "crash", "its process crashed with SIGSEGV"),
        ("graphs/crashes/2", "pass", ""),
        ("graphs/hangs", "timeout", "its process gave no answer within 1 s and was killed"),
        ("models/a/1", "pass", ""),
        ("fuzz/a", "pass", ""),
    ],
)
def test_each_case_gets_its_status(outcomes: dict[str, Outcome], id: str, status: str, reason: str) -> None:
    assert outcomes[id].status == status, outcomes[id]
    assert outcomes[id].reason.startswith(reason) and bool(outcomes[id].reason) == bool(reason)


def ratios(outcome: Outcome) -> list[float]:
    """Return what the case measured, each value over its bound."""
    return [measurement.ratio for measurement in outcome.measurements]


def test_details_say_what_happened(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["ops/fails"].detail == "the first\nfinding\nthe second finding"
    assert ratios(outcomes["ops/fails"]) == [0.5]
    assert "Traceback" in outcomes["ops/raises"].detail and "in raises" in outcomes["ops/raises"].detail
    assert "last words" in outcomes["graphs/crashes/1"].detail
    assert "Segmentation fault" in outcomes["graphs/crashes/1"].detail
    assert "in crashes" in outcomes["graphs/crashes/1"].detail
    hangs = outcomes["graphs/hangs"]
    assert "hanging now" in hangs.detail and "in hangs" in hangs.detail, "the stack at the deadline is missing"
    assert 1 <= hangs.elapsed_s < 5
    assert "pid" in outcomes["graphs/crashes/2"].notes[0]


def test_the_outcomes_are_in_the_order_of_collection(report: Report, watch: Watch) -> None:
    ids = [outcome.id for outcome in report.outcomes]
    assert ids == watch.cases == list(report.cases)
    assert ids[:4] == ["host/one", "torch/a/1", "ops/many-0/0", "ops/many-1/1"] and ids[-1] == "fuzz/a"
    assert sorted(watch.ids) == sorted(ids)
    assert report.cases["ops/fails"] == "shows ops/fails"


def test_the_report_says_where_it_ran(report: Report) -> None:
    assert report.name == "cpu" and report.plugin is not None and report.plugin.in_tree
    assert (report.environment.workers, report.environment.threads) == (2, 1)
    assert "float32" in report.environment.capabilities["dtypes"]
    assert report.reached == 0 and not report.passed
    assert (report.level, report.fuzz, report.seed, report.chosen) == (3, 3, 11, ())
    assert noted({o.id: o for o in report.outcomes}["fuzz/a"], "fuzz") == "3"


def test_exclusive_cases_run_alone_and_last(outcomes: dict[str, Outcome]) -> None:
    alone = [outcomes["torch/a/1"], outcomes["models/a/1"]]
    starts = [float(noted(outcome, "start")) for outcome in alone]
    others = [float(noted(o, "start")) for o in outcomes.values() if o not in alone and "start" in str(o.notes)]
    assert len(others) > 10 and max(others) < min(starts)
    assert float(noted(alone[0], "end")) < starts[1]


def test_both_workers_work_and_a_crash_moves_to_a_new_process(outcomes: dict[str, Outcome]) -> None:
    pids = {noted(outcome, "pid") for outcome in outcomes.values() if "pid" in str(outcome.notes)}
    assert len(pids) >= 3
    assert not any(is_running(int(pid)) for pid in pids)


def test_what_a_case_leaves_behind_is_put_back_and_told(outcomes: dict[str, Outcome]) -> None:
    notes = outcomes["ops/leaves/1"].notes
    assert "left behind, and put back: the default dtype from torch.float32 to torch.float64" in notes
    assert len(notes) == 2


@pytest.mark.slow
def test_a_case_alone_in_this_process_draws_the_same_numbers(
    everything: SuiteModules, outcomes: dict[str, Outcome]
) -> None:
    options = Options(device="cpu", in_process=True, chosen=("ops/draws/2",), seed=11, suite=everything)
    (outcome,) = run(options).outcomes
    assert noted(outcome, "drew") == noted(outcomes["ops/draws/1"], "drew") == noted(outcomes["ops/draws/2"], "drew")
    (other,) = run(Options(device="cpu", in_process=True, chosen=("ops/draws/2",), suite=everything)).outcomes
    assert noted(other, "drew") != noted(outcome, "drew")


@pytest.mark.slow
def test_this_process_gives_the_same_outcomes(
    everything: SuiteModules, outcomes: dict[str, Outcome], install_vendor: InstallVendor
) -> None:
    install_vendor()
    report = run(Options(device="acme", in_process=True, suite=everything, chosen=("ops/*", "models/*")))
    assert len(report.outcomes) > 20
    for outcome in report.outcomes:
        there = outcomes[outcome.id]
        assert (outcome.status, outcome.reason, ratios(outcome)) == (there.status, there.reason, ratios(there))
        assert len(outcome.notes) == len(there.notes)


@pytest.mark.slow
def test_a_debugger_is_called_where_a_case_raises(everything: SuiteModules) -> None:
    seen: list[BaseException] = []
    options = Options(device="cpu", in_process=True, chosen=("ops/raises", "ops/fails"), suite=everything)
    report = run(options, on_exception=seen.append)
    assert [type(error) for error in seen] == [ValueError] and seen[0].__traceback__ is not None
    assert report.counts["fail"] == 2 and report.reached is None


def test_the_first_failure_stops_a_run_that_asks_for_it(everything: SuiteModules) -> None:
    report = run(Options(device="cpu", in_process=True, fail_fast=True, suite=everything))
    statuses = {outcome.id: outcome.status for outcome in report.outcomes}
    assert statuses["ops/fails"] == "fail" and statuses["ops/many-0/0"] == "pass"
    assert statuses["ops/raises"] == statuses["models/a/1"] == "skip" and statuses["ops/declared"] == "not-supported"
    assert report.counts["fail"] == 1 and report.reached == 0
    assert "stopped at the first failure, ops/fails" in report.outcomes[-1].reason


def test_fuzzing_and_higher_levels_are_left_out(everything: SuiteModules) -> None:
    ids = [case.id for case in list_chosen(Options(device="cpu", level=1, in_process=True, suite=everything))]
    assert {id.partition("/")[0] for id in ids} == {"host", "torch", "ops"}


def test_a_chosen_case_must_exist(everything: SuiteModules) -> None:
    def choose(glob: str, **fields: Any) -> Options:
        return Options(device="cpu", in_process=True, chosen=("ops/fails", glob), suite=everything, **fields)

    with refused(UsageError, "'ops/fail'", "did you mean 'ops/fails'", "--list"):
        run(choose("ops/fail"))
    with refused(UsageError, "'ops/drawz/*'", "'ops/draws/1'"):
        run(choose("ops/drawz/*"))
    with refused(UsageError, "'models/*'", "they belong to level 3", "raise --level to 3"):
        run(choose("models/*", level=1))
    with refused(UsageError, "'fuzz/*'", "give --fuzz"):
        run(choose("fuzz/*"))


def test_an_unknown_device_is_an_error(everything: SuiteModules) -> None:
    with refused(UnknownDeviceError, "'cqu'", "did you mean 'cpu'?"):
        run(Options(device="cqu", in_process=True, suite=everything))


DOES_NOT_OPEN = (
    "@hookimpl\ndef core_open_device(context):\n"
    "    raise DeviceUnavailableError('device', found='card is asleep', remedy='wake it')\n"
)


@pytest.mark.slow
def test_level_0_runs_on_a_device_that_does_not_open(install_vendor: InstallVendor, everything: SuiteModules) -> None:
    install_vendor(plugin=DOES_NOT_OPEN)
    report = run(Options(device="acme", in_process=True, suite=everything))
    assert [(outcome.id, outcome.status) for outcome in report.outcomes] == [("host/one", "pass")]
    assert report.obstacles[0] == "the cases above level 0 could not be collected: card is asleep"
    assert report.plugin is not None and report.plugin.distribution == "acme-device"
    assert report.environment.device_name == "" and report.environment.versions["torch"]
    with refused(UsageError, "'ops/fails'", "card is asleep", "wake it"):
        run(Options(device="acme", in_process=True, suite=everything, chosen=("ops/fails",)))
    with refused(DeviceUnavailableError, "card is asleep"):
        list_chosen(Options(device="acme", in_process=True, suite=everything))


def test_the_suite_itself_is_collected_the_same_each_time_and_travels() -> None:
    first, second = (Session(WorkerOptions(device="cpu")).collect() for _ in range(2))
    assert first.error is None and len(first.cases) > 300
    assert [case.id for case in first.cases] == [case.id for case in second.cases]
    assert {case.area for case in first.cases} == AREAS.keys()
    assert [case.id for case in first.cases if not re.fullmatch(r"[a-z0-9_.+-]+(/[a-z0-9_.+-]+)+", case.id)] == []
    assert Collected.from_json(json.loads(json.dumps(first.to_json()))) == first


@pytest.mark.slow
def test_threads_are_one_or_those_asked_for_and_given_back(suite: InstallSuite) -> None:
    modules = suite("CASES = (case('host/one', lambda trial: trial.note(f'threads {torch.get_num_threads()}')),)")
    before = torch.get_num_threads()
    for asked, got in ((None, "1"), (3, "3")):
        (outcome,) = run(Options(device="cpu", threads=asked, in_process=True, suite=modules)).outcomes
        assert noted(outcome, "threads") == got
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_a_case_that_was_not_collected_fails(everything: SuiteModules) -> None:
    lane = Session(WorkerOptions(device="cpu", suite=everything))
    outcome = lane.run(CaseInfo(id="ops/elsewhere", what=""))
    lane.close()
    assert outcome.status == "fail" and "what is collected must not vary" in outcome.reason


BREAKS = """
import dataclasses
def synchronize():
    if hasattr(torch, "broken_by_a_case"):
        raise RuntimeError("illegal address")
@hookimpl
def core_open_device(context):
    return dataclasses.replace(parts(), synchronize=synchronize)
"""


@pytest.mark.slow
def test_a_case_that_breaks_the_device_fails_and_gives_the_process_up(
    install_vendor: InstallVendor, suite: InstallSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vendor(plugin=BREAKS)
    modules = suite("def breaks(trial):\n    torch.broken_by_a_case = True\nCASES += (case('host/breaks', breaks),)")
    session = Session(WorkerOptions(device="acme", suite=modules))
    session.collect()
    assert session.run(CaseInfo(id="host/one", what="")).status == "pass" and session.usable
    monkeypatch.setattr(torch, "broken_by_a_case", False, raising=False)  # so that it goes when the test is over
    monkeypatch.delattr(torch, "broken_by_a_case")
    outcome = session.run(CaseInfo(id="host/breaks", what=""))
    session.close()
    assert outcome.status == "fail" and "illegal address" in outcome.reason and not session.usable
    assert "the device no longer works after this case" in outcome.notes[-1]


def test_few_cases_are_left_to_one_worker(suite: InstallSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    from core_conformance.runner import session as running

    monkeypatch.setattr(running, "_cores", lambda: 64)
    assert running._num_lanes(Options(device="cpu"), CASES_PER_WORKER) == 1
    assert running._num_lanes(Options(device="cpu"), CASES_PER_WORKER + 1) == 2
    assert running._num_lanes(Options(device="cpu"), 10_000) == running.MAX_WORKERS
    assert running._num_lanes(Options(device="cpu", workers=7), 10_000) == 7
    assert running._num_lanes(Options(device="cpu", workers=7), 3) == 3
    assert running._num_lanes(Options(device="cpu", workers=7), 0) == 1
