"""core_cuda/passes/shared_experts.py and its second stream: matches, bits, near-misses, the order of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.errors import CaptureError, CoreError
from core.verify.planted import Mistake, with_mistake

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda import streams
from core_cuda.ops import beside, launching
from core_cuda.ops.moe import shared
from core_cuda.passes.shared_experts import OVERLAP_SHARED_EXPERTS
from tests.kernel_cases import randn

NAME = OVERLAP_SHARED_EXPERTS.name
ASKED = {"enable_passes": (NAME,)}
HALVES = (torch.bfloat16, torch.float16)


def mixtures() -> list[tuple[nn.Module, Tensor]]:
    """Return the pass's examples, with rows that they take."""
    assert OVERLAP_SHARED_EXPERTS.examples is not None
    return [(model, x) for model, (x,) in OVERLAP_SHARED_EXPERTS.examples()]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("index", [0, 1], ids=["flat", "seen otherwise"])
@torch.no_grad()
def test_the_shared_expert_joins_the_others_and_no_bit_changes(
    index: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    model, x = mixtures()[index]
    x = x.to(dtype)
    device = device_with(kernel_device, OVERLAP_SHARED_EXPERTS)
    # Nothing is timed, by which two programs could choose kernels that round otherwise.
    program, reports = compiled(model, device, x, verify="full", strict=True, measure=False, **ASKED)
    report = reports[NAME]
    assert (report.matched, report.near_misses, report.verification) == (1, (), "verified")
    apart, reports = compiled(model, device, x, measure=False)
    assert reports[NAME].matched == 0 and "has not been timed" in reports[NAME].skipped
    inputs = x.to(device.torch_device)
    assert torch.equal(program(x=inputs), apart(x=inputs))


class Mixture(nn.Module):
    """A mixture with a shared expert whose gated product is read twice (`reread`), or that reads other tokens."""

    def __init__(self, *, reread: bool = False, chained: bool = False) -> None:
        super().__init__()
        model, _ = mixtures()[0]
        self.inner, self.reread, self.chained = model, reread, chained

    def forward(self, x: Tensor) -> Tensor:
        ops, own = torch.ops.core, self.inner
        rows = x.view(-1, x.shape[-1])
        weights, indices = ops.moe_route(ops.linear(rows, own.router), 2)
        routed = ops.grouped_mlp(rows, weights, indices, own.gate_up, own.down, kind="silu")
        gated = ops.gated_linear(routed.sin() if self.chained else rows, own.shared_gate_up, None, kind="silu")
        out: Tensor = routed + ops.linear(gated, own.shared_down)
        return out + gated.sum() if self.reread else out


@pytest.mark.parametrize(
    ("model", "dtype", "skipped", "reason"),
    [
        (Mixture(reread=True), torch.bfloat16, "", "is used otherwise than in a linear layer"),
        (Mixture(chained=True), torch.bfloat16, "", ""),
        (Mixture(), torch.float32, "no value in the graph has torch.bfloat16 or torch.float16", ""),
    ],
    ids=["read twice", "after the others", "fp32"],
)
@torch.no_grad()
def test_other_mixtures_stay(
    model: nn.Module, dtype: torch.dtype, skipped: str, reason: str, kernel_device: torch.device
) -> None:
    device = device_with(kernel_device, OVERLAP_SHARED_EXPERTS)
    report = compiled(model, device, randn(2, 5, 32, dtype=dtype), strict=True, **ASKED)[1][NAME]
    assert report.matched == 0 and report.skipped.startswith(skipped) and bool(report.skipped) == bool(skipped)
    assert [reason in miss.reason for miss in report.near_misses] == [True] * bool(reason)


def forget_gate(node: fx.Node) -> bool:
    """Give the shared expert another gate."""
    if node.target is not shared.experts_beside_shared:
        return False
    node.kwargs = {**node.kwargs, "shared_kind": "gelu"}
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="wrong", of=NAME, what=str(forget_gate.__doc__), make=forget_gate)
    device = device_with(kernel_device, with_mistake(OVERLAP_SHARED_EXPERTS, mistake))
    model, x = mixtures()[0]
    with pytest.raises(CoreError, match=NAME):
        compiled(model, device, x.bfloat16(), verify="full", strict=True, **ASKED)


class Stream:
    """A stream that notes what is asked of it."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.cuda_stream, self.device, self._log = number, torch.device("cuda", 0), log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    def record_event(self) -> str:
        return f"what {self.cuda_stream} has done after {self._log[-1]!r}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.cuda_stream} waits for {event}")


class Target:
    """What notes on which stream it is written."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def copy_(self, source: Any) -> None:
        self._log.append(f"copy to {self._name} on {torch.cuda.current_stream().cuda_stream}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have stream 1 be current and stream 2 go with it; return what is done, in order."""
    done: list[str] = []
    main, other = Stream(1, done), Stream(2, done)
    current = [main]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(streams, "_BESIDE", {(main.device, 1): other})
    monkeypatch.setattr(launching, "_FULLY_ORDERED", set())
    monkeypatch.setattr(launching, "can_overlap", lambda: True)
    return done


class Kernel:
    """What launches like a kernel that may overlap, and notes on which stream it was launched, and how."""

    arg_names = ("OVERLAP",)

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**options: Any) -> None:
            how = "early" if options.get("launch_pdl") else "in full order"
            self._log.append(f"{self._name} on {torch.cuda.current_stream().cuda_stream}, {how}")

        return run

    def launch(self) -> str:
        launching.launch(self, (1,))
        return self._name


def test_branches_fork_and_join_and_the_first_kernel_after_each_overlaps_with_none(log: list[str]) -> None:
    a, b, c, d = (Kernel(name, log) for name in "abcd")
    a.launch()
    found = beside.run_beside(torch.device("cuda"), b.launch, lambda: (c.launch(), c.launch())[0])
    d.launch()
    d.launch()
    assert found == ("b", "c")
    assert log == [
        "a on 1, early",
        "2 waits for 1",
        "c on 2, in full order",
        "c on 2, early",
        "b on 1, early",
        "1 waits for 2",
        "d on 1, in full order",
        "d on 1, early",
    ]


def test_copies_run_beside_products_that_wait_for_one_each(log: list[str]) -> None:
    a, b = (Kernel(name, log) for name in "ab")
    with beside.Copies(torch.device("cuda")) as copies:
        first, _ = (copies.copy(Target(name, log), None) for name in ("x", "y"))  # type: ignore[arg-type]
        a.launch()
        first()
        b.launch()
    a.launch()
    assert log == [
        "2 waits for 1",
        "copy to x on 2",
        "2 waits for 1",
        "copy to y on 2",
        "a on 1, early",
        "1 waits for what 2 has done after 'copy to x on 2'",
        "b on 1, in full order",
        "1 waits for 2",
        "a on 1, in full order",
    ]


def test_copies_beside_work_that_fails_are_waited_for(log: list[str]) -> None:
    with pytest.raises(ValueError, match="planted"), beside.Copies(torch.device("cuda")) as copies:
        copies.copy(Target("x", log), None)  # type: ignore[arg-type]
        raise ValueError("planted")
    assert log[-1] == "1 waits for 2"


def test_branches_that_fail_are_joined_all_the_same(log: list[str]) -> None:
    def fail() -> None:
        raise ValueError("planted")

    for first, second in ((fail, Kernel("c", log).launch), (Kernel("b", log).launch, fail)):
        log.clear()
        with pytest.raises(ValueError, match="planted"):
            beside.run_beside(torch.device("cuda"), first, second)
        assert log[0] == "2 waits for 1" and log[-1] == "1 waits for 2"
        assert torch.cuda.current_stream().cuda_stream == 1


def test_a_second_stream_is_not_made_in_a_capture(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_BESIDE", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="run the same call once on this stream before the capture"):
        streams.beside(torch.device("cuda", 0))


def test_a_stream_goes_with_one_other_only(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's streams come round again: those that are taken already are passed over, until none is left."""
    numbers = iter([1, 2, 3, *[1, 2, 3] * 20])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(numbers), log))
    monkeypatch.setattr(streams, "_keep_workspace", lambda stream: log.append(f"workspace of {stream.cuda_stream}"))
    monkeypatch.setattr(streams, "_BESIDE", {(torch.device("cuda", 0), 7): Stream(2, log)})
    assert streams.beside(torch.device("cuda", 0)).cuda_stream == 3
    assert streams.beside(torch.device("cuda", 0)).cuda_stream == 3 and log == ["workspace of 3"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(8, log))
    with pytest.raises(CaptureError, match="all 32 streams that torch has are taken by programs"):
        streams.beside(torch.device("cuda", 0))


def test_many_tokens_stay_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def run_both(device: torch.device, *work: Any) -> list[Any]:
        asked.append(device)
        return [each() for each in work]

    def same(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    monkeypatch.setattr(shared, "grouped_mlp", same)
    monkeypatch.setattr(shared, "products", SimpleNamespace(gated_linear=same, linear=same))
    monkeypatch.setattr(shared, "run_beside", run_both)
    for tokens in (shared.MOST_TOKENS, shared.MOST_TOKENS + 1):
        x, y = torch.zeros(tokens, 1), torch.ones(tokens, 1)
        routed, own = shared.experts_beside_shared(*(x,) * 5, y, x, None, x, None, kind="silu", shared_kind="silu")
        assert torch.equal(routed, x) and torch.equal(own, y)
    assert len(asked) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or launching.INTERPRETED, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 8, 64])
@torch.no_grad()
def test_captured_branches_give_the_bits_of_one_stream(tokens: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    layers = [
        (numbers(8, 1024, 512), numbers(8, 512, 512), numbers(1024, 512), numbers(512, 512), numbers(8, 512))
        for _ in range(6)
    ]

    def forward(x: Tensor, beside: bool) -> Tensor:
        for gate_up, down, shared_gate_up, shared_down, router in layers:
            weights, indices = torch.ops.core_cuda.moe_route(torch.ops.core_cuda.linear(x, router, None), 2)
            routed_args = (x, weights, indices, gate_up, down)
            if beside:
                given = (*routed_args, x, shared_gate_up, None, shared_down, None)
                routed, own = shared.experts_beside_shared(*given, kind="silu", shared_kind="silu")
            else:
                routed = torch.ops.core_cuda.grouped_mlp(*routed_args, kind="silu")
                inner = torch.ops.core_cuda.gated_linear(x, shared_gate_up, None, kind="silu")
                own = torch.ops.core_cuda.linear(inner, shared_down, None)
            x = torch.ops.core_cuda.rms_norm(x + routed + own, None, 1e-6)
        return x

    x = numbers(tokens, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward(x, True)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = forward(x, True)
    for step in range(200):
        x.copy_(numbers(tokens, 512))
        graph.replay()
        assert torch.equal(captured, forward(x, False)), step
