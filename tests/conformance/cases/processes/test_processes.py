"""core_conformance/cases/processes: two processes do together what one does, and whoever is lost is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from core.common.conformance import ConformanceProfile
from core.common.ops.canonical import OPS
from core.device import Device
from core.host.selection import select_device
from core_conformance.case import Case, CaseInfo
from core_conformance.cases.processes import collect as processes
from core_conformance.cases.processes.job import close_kept, run_in_all
from core_conformance.cases.processes.models import ALONE, Shard, canonical, forward, weights
from core_conformance.cases.processes.ops import of_rank, whole
from core_conformance.outcome import Measurement, Outcome, Status
from core_conformance.trial import NotSupported, Skip, Trial
from tests.conformance.suites import write_suite
from tests.conformance.support import run_case
from tests.support import cpu

HANGING = """
from datetime import timedelta
from torch import distributed

def reduced(trial, late=""):
    from core.engine.models.distributed import initialize
    rank = initialize("gloo", timeout_s=10).rank
    numbers = torch.full((3,), 1.0 + rank)
    if rank == 1 and late == "hangs":
        time.sleep(600)
    if rank == 1 and late == "ends":
        os._exit(7)
    distributed.all_reduce(numbers)
    trial.same("the sum", numbers.tolist(), [3.0] * 3)

CASES = ()

def collect(device, profile):
    for late in ("", "hangs", "ends"):
        yield case(f"graphs/late{late}", lambda trial, late=late: reduced(trial, late))
"""


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    close_kept()


def trial() -> Trial:
    return Trial("cpu", lambda: (cpu(), ConformanceProfile()))


def cases(device: Device) -> dict[str, Case]:
    return {case.id: case for case in processes.collect(device, ConformanceProfile())}


def test_a_lost_process_is_one_failure_that_names_it() -> None:
    found = trial()
    measured = Measurement(name="call 0", criterion="T1", ratio=0.5)
    waited = Outcome(id="graphs/x", status="fail", reason="timed out waiting", detail="stack", measurements=(measured,))
    hung = Outcome(id="graphs/x", status="timeout", reason="gave no answer", detail="where it stood")
    processes.report(found, [waited, hung])
    assert found.failures == ["rank 1: timeout: gave no answer", "what rank 1 told:\nwhere it stood"]
    assert found.notes == ["rank 0: fail: timed out waiting"] and found.measurements == [measured]


def test_each_rank_that_is_wrong_is_named() -> None:
    found = trial()
    processes.report(found, [Outcome(id="graphs/x", status="fail", reason=f"wrong {rank}") for rank in range(2)])
    assert found.failures == ["rank 0: fail: wrong 0", "rank 1: fail: wrong 1"] and found.notes == []


def test_a_device_without_collectives_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.why_alone(cpu(), 2) == ""
    monkeypatch.setattr(processes, "num_devices", lambda device: 1)
    assert processes.why_alone(cpu(), 2) == "2 processes need a device each, and there is 1 of type 'cpu'"
    assert {case.not_supported for case in cases(cpu()).values() if case.id.endswith("/off")} == {
        processes.why_alone(cpu(), 2)
    }
    monkeypatch.setattr(distributed, "is_backend_available", lambda name: False)
    assert processes.why_alone(cpu(), 2) == "this torch has no 'gloo', its process group for devices of type 'cpu'"

    def unknown(device: torch.device) -> str:
        raise ValueError("Default backend not registered")

    monkeypatch.setattr(distributed, "get_default_backend_for_device", unknown)
    assert processes.why_alone(cpu(), 2) == "torch.distributed has no process group for devices of type 'cpu'"


def test_shards_of_one_process_are_the_whole() -> None:
    whole = weights(0, torch.empty(0), 1)
    shard, x = Shard(whole, canonical(), 0, 1), torch.randn(4, 16)
    with torch.no_grad():
        for name, value in forward(x, whole, ALONE).items():
            assert torch.equal(shard(x)[name], value)


def test_there_is_a_case_in_every_mode_and_off() -> None:
    found = cases(cpu())
    modes = {name.rpartition("/")[2] for name in found if not name.startswith("ops/")}
    assert modes == {"full", "piecewise", "segmented", "compile", "off"}
    runs = [name for name, case in found.items() if not case.not_supported and not name.startswith("ops/")]
    assert sorted(runs) == [
        "graphs/processes/canonical/compile",
        "graphs/processes/canonical/off",
        "graphs/processes/functional/compile",
        "graphs/processes/functional/off",
        "graphs/processes/lowered/compile",
        "models/processes/llama/compile",
        "models/processes/llama/off",
        "passes/processes/fused/compile",
        "passes/processes/none/compile",
        "passes/processes/overlapped/compile",
        "passes/processes/split/compile",
    ]


def test_every_collective_op_is_judged_alone_by_all_that_a_device_has_for_it() -> None:
    found = {name for name in cases(cpu()) if name.startswith("ops/")}
    collectives = [op.name for op in OPS if op.is_collective]
    assert len(collectives) >= 9
    for name in collectives:
        assert f"ops/processes/{name}/reference/bfloat16" in found


def test_more_processes_than_devices_are_not_supported_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "num_devices", lambda device: 2)
    found = trial()
    found.ranks = 3
    with pytest.raises(NotSupported, match="3 processes need a device each, and there is 2"):
        processes.judge_all(found, id="ops/processes/x")


@pytest.mark.parametrize(("status", "kind"), [("not-supported", NotSupported), ("skip", Skip)])
def test_what_no_rank_runs_is_no_failure_and_what_one_does_not_is(status: Status, kind: type[Exception]) -> None:
    left_out, passed = Outcome(id="x", status=status, reason="too wide"), Outcome(id="x", status="pass")
    with pytest.raises(kind, match="too wide"):
        processes.report(trial(), [left_out, left_out])
    found = trial()
    processes.report(found, [passed, left_out])
    assert found.failures == [f"rank 1: {status}: too wide"]


def test_ranks_have_values_of_their_own_and_sizes_that_can_be_divided() -> None:
    for op in (op for op in OPS if op.is_collective):
        for sample in op.samples(torch.float32, torch.device("cpu")):
            each = [of_rank(op, sample.kwargs, rank, 3) for rank in range(3)]
            if each[0]["x"].numel():
                assert not torch.equal(each[0]["x"], each[1]["x"])
            whole(op, 2, each)


@pytest.mark.slow
def test_a_process_that_hangs_or_ends_is_told_from_the_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, monkeypatch, HANGING).host

    def run(name: str) -> list[Outcome]:
        case = CaseInfo(id=f"graphs/late{name}", what="", timeout_s=25.0)
        return run_in_all(case, ("cpu", "cpu"), suite=suite, seed=0, timeout_factor=1.0)

    assert [outcome.status for outcome in run("")] == ["pass", "pass"]
    waiting, hung = run("hangs")
    assert waiting.status == "fail" and "imed out" in waiting.reason
    assert hung.status == "timeout" and "no answer within 25 s" in hung.reason
    waiting, ended = run("ends")
    assert waiting.status == "fail"
    assert ended.status == "crash" and "exit code 7" in ended.reason
    assert [outcome.status for outcome in run("")] == ["pass", "pass"], "what is left of a failure is not used again"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acme", "cpu"])
def test_two_processes_do_what_one_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "acme":
        from example_vendor import install

        install(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert str(tmp_path) in sys.path
    device = select_device(name)
    wanted = [
        case
        for case in cases(device).values()
        if not case.not_supported and case.area != "ops" and "lowered" not in case.id
    ]
    # In every mode of the device: 2 ways to write a forward, 4 choices of passes, the model.
    assert len(wanted) == (20 if name == "acme" else 10)
    for case in wanted:
        assert run_case(case, device) == [], case.id
