"""Area graphs of the suite: the honest devices pass every case, and each planted mistake is rejected by its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from core_acme.host_arguments import window_sum

from core.common.conformance import ConformanceProfile, HostArgumentExample
from core.common.graphs.backend import CallBackend, GraphKey
from core.compilation.capture import plan
from core.device import Device, MemoryInfo
from core.host.selection import select_device
from core_conformance.case import Case
from core_conformance.cases.calls import collect as calls
from core_conformance.cases.graphs import collect as graphs
from core_conformance.cases.graphs import memory as graph_memory
from core_conformance.cases.graphs.promises import GRAPHS, MODES
from tests.conformance.cases.graphs import faulty_backends as faulty
from tests.conformance.support import run_case
from tests.recording import acme


def windows(device: torch.device) -> HostArgumentExample:
    """Sums over windows whose lengths come from the host."""
    x = torch.arange(24.0, device=device).view(3, 8)
    return HostArgumentExample(
        function=window_sum,
        inputs={"x": x},
        steps=({"lengths": [1, 2, 3]}, {"lengths": [8, 0, 5]}, {"lengths": [4, 4, 4]}),
    )


PROFILE = ConformanceProfile(host_argument_example=windows)
SLOW = ("graphs/default-lowering/compile",)
"""Compiled by Inductor, which the run of the whole suite does as well."""


def cases(device: Device, profile: ConformanceProfile = PROFILE) -> dict[str, Case]:
    found = [*graphs.collect(device, profile), *calls.collect(device, profile)]
    assert len({case.id for case in found}) == len(found)
    return {case.id: case for case in found}


def running(device: Device) -> list[Case]:
    return [case for case in cases(device).values() if not case.not_supported and case.id not in SLOW]


ACME, CPU = acme(), select_device("cpu")


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with little memory: the account of the recording device is exact."""
    monkeypatch.setattr(graph_memory, "MEMORY_PROBE_BYTES", 2**20)
    monkeypatch.setattr(graph_memory, "MEMORY_ALLOWANCE_BYTES", 2**18)


@pytest.mark.cases(10)
@pytest.mark.usefixtures("small_probes")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", running(ACME), ids=lambda case: case.id)
def test_the_recording_device_passes(case: Case) -> None:
    assert run_case(case, ACME, PROFILE) == []


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", running(CPU), ids=lambda case: case.id)
def test_the_processor_passes(case: Case) -> None:
    assert run_case(case, CPU) == []


def test_what_is_not_declared_is_not_run() -> None:
    by_id = cases(ACME)
    assert by_id["graphs/replay/compile/float32"].not_supported == "the device does not declare mode 'compile'"
    assert all(case.not_supported for name, case in cases(CPU).items() if set(GRAPHS) & set(name.split("/")))
    narrow = replace(ACME.parts.capabilities, dtypes=frozenset({torch.float32}), update=False)
    by_id = cases(replace(ACME, parts=replace(ACME.parts, capabilities=narrow)))
    assert by_id["graphs/calls/full/float16"].not_supported == "the device does not declare float16"
    assert by_id["graphs/host-arguments/full"].not_supported == "the device declares update=False"
    off = cases(acme(modes=("off",)))
    assert {case.not_supported for case in off.values()} == {"the device declares no capture mode"}
    assert {name.split("/")[2] for name in off} == {"off"}
    assert {name.split("/")[1] for name in off} == {name.split("/")[1] for name in by_id}
    assert {name.split("/")[2] for name in by_id} == set(MODES)


def test_cases_are_the_same_in_every_process() -> None:
    first, second = cases(ACME), cases(acme())
    assert list(first) == list(second)
    assert {name for name, case in first.items() if case.exclusive} == {
        f"graphs/{name}/{mode}" for name in ("memory", "memory-after-failure", "memory-many") for mode in MODES
    }


GRAPH_FAULTS: list[tuple[type, str, str]] = [
    (faulty.Stale, "replay/full/float32", "replay 0, output 0"),
    (faulty.Stale, "addresses/full", "weights and inputs changed"),
    (faulty.StaleWeights, "addresses/full", "weights changed in place"),
    (faulty.StaleWeights, "weights/full", "weights scaled in place"),
    (faulty.WritesTwice, "writes-once/full", "'runs' after 1 replays"),
    (faulty.WritesTwice, "writes-once/segmented", "'sums' after 1 replays"),
    (faulty.WritesTwice, "state/full", "runs after call 0"),
    (faulty.KeepsTapes, "memory/full", "bytes kept"),
    (faulty.KeepsTapes, "memory/segmented", "bytes kept"),
    (faulty.KeepsFailures, "memory-after-failure/full", "bytes kept"),
    (faulty.EagerReplay, "python-once/full", "ran the captured Python"),
    (faulty.EagerReplay, "constants/full", "a host's number"),
    (faulty.ReplaysUnknown, "unknown-keys/full", "returns 2 tensors with"),
    (faulty.ReplaysUnknown, "unknown-keys/piecewise", "returns 0 tensors with"),
    (faulty.ClaimsUnknown, "unknown-keys/segmented", "can_run"),
    (faulty.WrongKey, "keys/full", "decode[4], call 1"),
    (faulty.WrongKey, "guards/full", ""),
    (faulty.WrongKey, "buckets/full", ""),
    (faulty.SharedOutputs, "outputs/full", "replay 0, output 1"),
    (faulty.SharedOutputs, "outputs/full", "share memory"),
    (faulty.Overlapping, "outputs/full", "strides"),
    (faulty.Moving, "outputs/full", "outputs move"),
    (faulty.Noise, "replay/full/bfloat16", "differ in bits"),
    (faulty.Noise, "calls/full/float32", ""),
    (faulty.LateLanding, "replay/full/float16", "replay 1, output 0"),
    (faulty.LateLanding, "read-at-once/full", "round 0: read by .cpu()"),
    (faulty.LateLanding, "calls/full/float32", ""),
    (faulty.LateParts, "segments/piecewise", "what the eager call of replay 1 saw"),
    (faulty.LateParts, "breaks/piecewise", "call 1, output 0"),
    (faulty.LateParts, "replay/segmented/float32", ""),
    (faulty.FailureSticks, "fails-in-capture/full", "still capturing"),
    (faulty.FailureSticks, "fails-in-second-part/segmented", "still capturing"),
    (faulty.FailureSticks, "host-read/full", "still capturing"),
    (faulty.LosesOthers, "fails-in-first-part/piecewise", ""),
    (faulty.CaptureWrites, "no-side-effects/full", "'runs' after recording 1"),
    (faulty.CaptureWrites, "no-side-effects/segmented", "'runs' after recording 2"),
    (faulty.CaptureWrites, "fails-in-capture/full", "what an abandoned recording wrote"),
    (faulty.WarmsUpOften, "no-side-effects/full", "after recording 1"),
    (faulty.DrawsNumbers, "random-state/full", "random state after capture"),
    (faulty.DrawsNumbers, "random-state/piecewise", "random state after recording"),
    (faulty.FreezesNumbers, "random-numbers/full", "gave the same rand"),
    (faulty.FreezesReads, "host-read/full", "with a host read in it"),
    (faulty.FreezesReads, "host-read/segmented", "with a host read in it"),
    (faulty.LosesOthers, "fails-in-capture/full", "decode[8]"),
    (faulty.KeepsFirst, "capture-again/full", "captured in round 1"),
    (faulty.IgnoresCaptures, "capture-again/full", "captured in round 1, 1"),
    (faulty.OneForAll, "two-programs/full", ""),
    (faulty.OneForAll, "closing/full", ""),
    (faulty.MixesThreads, "threads-replay/full", "replays of several threads"),
    (faulty.MixesThreads, "threads-capture/segmented", ""),
    (faulty.MixesThreads, "threads/full", ""),
    (faulty.IgnoresUpdates, "host-arguments/full", "step 1, called"),
    (faulty.IgnoresUpdates, "host-arguments/piecewise", "step 1, called"),
    (faulty.Compiles, "serving/full", "torch compiled grown"),
]


@pytest.mark.cases(6)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("backend", "name", "phrase"), GRAPH_FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_faulty_backend_is_rejected(backend: type, name: str, phrase: str) -> None:
    device = acme(graph_backend=backend)
    try:
        failures = run_case(cases(device)[f"graphs/{name}"], device, PROFILE)
    finally:
        for kept in (faulty.KeepsTapes.kept, faulty.KeepsFailures.kept, faulty.OneForAll.table):
            kept.clear()  # type: ignore[attr-defined]
    assert failures and any(phrase in text for text in failures), failures


CALL_FAULTS: list[tuple[type, str, str]] = [
    (faulty.CallsTwice, "writes-once", "'runs' after 1 replays"),
    (faulty.CallsTwice, "state", "runs after call 0"),
    (faulty.CallsAny, "keys", "decode[8], call 0"),
    (faulty.CallsAny, "unknown-keys", "returns 2 tensors with"),
    (faulty.CallsAny, "buckets", "rows of"),
    (faulty.CallsOnce, "replay/float32", "replay 0, output 0"),
    (faulty.CallsOnce, "addresses", "weights changed in place"),
    (faulty.CallsOnce, "random-numbers", "gave the same rand"),
    (faulty.CallsOnce, "read-at-once", "read by .cpu()"),
]


@pytest.mark.parametrize(("backend", "name", "phrase"), CALL_FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_faulty_backend_of_compiled_programs_is_rejected(backend: type, name: str, phrase: str) -> None:
    promise, *dtype = name.split("/")
    device = replace(CPU, graph_backend=backend)
    failures = run_case(cases(device)["/".join(("graphs", promise, "compile", *dtype))], device)
    assert any(phrase in text for text in failures), failures


@pytest.mark.parametrize("policy", ["zero", "sentinel", "edge"])
def test_padding_that_is_left_out_is_rejected(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pad = plan._padding

    def padding(name: str, spec: Any, buffer: Any, shape: Any) -> Any:
        return [] if spec.padding == policy else pad(name, spec, buffer, shape)

    monkeypatch.setattr(plan, "_padding", padding)
    failures = run_case(cases(ACME)["graphs/padding/full"], ACME, PROFILE)
    assert failures and all(f"padding {policy!r}" in text for text in failures), failures


@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(
    ("info", "phrase"),
    [
        (MemoryInfo(used_bytes=0, total_bytes=2**30, peak_bytes=0), "the account rose by 0 bytes"),
        (MemoryInfo(used_bytes=2**20, total_bytes=2**30, peak_bytes=0), "the peak is below"),
        (MemoryInfo(used_bytes=2**20, total_bytes=2**10, peak_bytes=2**20), "more in use than there is"),
    ],
)
def test_an_account_that_does_not_move_or_add_up_is_rejected(info: MemoryInfo, phrase: str) -> None:
    device = replace(ACME, parts=replace(ACME.parts, memory=lambda: info))
    failures = run_case(cases(device)["graphs/memory/full"], device, PROFILE)
    assert any(phrase in text for text in failures), failures


def test_host_arguments_need_an_example_that_tells_steps_apart() -> None:
    case = cases(ACME)["graphs/host-arguments/full"]
    assert run_case(case, ACME) == [
        "the device declares update=True, and its profile has no host_argument_example to try"
    ]

    def alike(device: torch.device) -> HostArgumentExample:
        return replace(windows(device), steps=({"lengths": [1, 1, 1]}, {"lengths": [1, 1, 1]}))

    (failure,) = run_case(case, ACME, ConformanceProfile(host_argument_example=alike))
    assert "they prove nothing" in failure


class Jittery(CallBackend):
    """Sums in another order at each replay, as a device may that declares so."""

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        first, *rest = super().replay(key, step)
        return first + first.abs().mul(torch.finfo(first.dtype).eps).mul(torch.rand_like(first) / 2), *rest


def test_declared_ops_may_differ_in_bits_within_the_criterion() -> None:
    device = replace(CPU, graph_backend=Jittery)
    case = cases(device)["graphs/replay/compile/float32"]
    assert any("differ in bits" in text for text in run_case(case, device))
    assert run_case(case, device, ConformanceProfile(nondeterministic_ops=frozenset({"aten::mm"}))) == []
    assert run_case(case, device, ConformanceProfile(nondeterministic_ops=frozenset({"aten::index_add"}))) != []
    loose = replace(CPU.parts.capabilities, deterministic=False)
    assert run_case(case, replace(device, parts=replace(CPU.parts, capabilities=loose))) == []
