"""core/compilation/shared_trace.py: one trace for phases that differ in one argument of one op, and when it is none
for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core import InputSpec, Program
from core.common.graphs.backend import GraphKey
from core.compilation.capture.runner import GraphRunner
from core.compilation.shared_trace import SharedTrace, copy_graph
from core.compilation.trace.tracing import trace
from core.errors import CaptureError, TraceError, UsageError
from tests.recording import acme
from tests.support import compile_with, cpu, refused

ROWS = {"x": InputSpec(("n", 4), torch.float32)}
BUCKETS = {"decode": [1, 4], "prefill": [16]}
OFFSETS = {"decode": 0.5, "prefill": 0.25}
SHARED = SharedTrace(op="core::gated_activation", argument="up_offset", values=OFFSETS)
Make = Callable[[float], Callable[..., Any]]


def gate(x: Tensor, offset: float) -> Tensor:
    gated: Tensor = torch.ops.core.gated_activation(x, x * 2, kind="silu", up_offset=offset)
    return gated


def plain(offset: float) -> Callable[..., Any]:
    return lambda x: gate(x, offset) + 1


def compiled(make: Make, **options: Any) -> Program:
    options = {"inputs": ROWS, "buckets": BUCKETS, "lowering": "inline", "shared": SHARED} | options
    return compile_with({phase: make(offset) for phase, offset in OFFSETS.items()}, cpu(), **options)


def served(program: Program) -> list[tuple[str, list[int], str]]:
    return [(each.phase, [key.dims[0] for key in each.buckets], each.trace_of) for each in program.report().traces]


def check(program: Program, make: Make) -> None:
    for phase, offset in OFFSETS.items():
        for rows in (1, 2, 4, 16)[: 4 if phase == "prefill" else 3]:
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
            torch.testing.assert_close(program(phase, x=x), make(offset)(x), rtol=1e-6, atol=1e-6)


def test_one_trace_serves_the_phases_and_a_size_of_one() -> None:
    program = compiled(plain)
    assert served(program) == [("decode", [4, 1], ""), ("prefill", [16], "decode")]
    first, second = program.report().traces
    assert program.report().num_traces == 1
    assert first.trace_s > 0 == second.trace_s and first.num_nodes == second.num_nodes
    assert f"trace prefill: {second.num_nodes} nodes of the trace of decode, " in str(program.report())
    check(program, plain)


def test_without_the_callers_word_each_phase_is_traced() -> None:
    program = compiled(plain, shared=None)
    assert served(program) == [("decode", [4, 1], ""), ("prefill", [16], "")]
    check(program, plain)


def test_a_branch_between_the_phases_is_traced_on_both_sides() -> None:
    def branches(offset: float) -> Callable[..., Any]:
        return lambda x: gate(x, offset) + 1 if x.shape[0] > 8 else gate(x, offset) - 1

    program = compiled(branches)
    assert served(program) == [("decode", [4, 1], ""), ("prefill", [16], "")]
    assert "x has size 4 in dimension 0, traced for 9 and up" in program.report().traces[0].reason
    x = torch.ones(4, 4)
    assert torch.equal(program("decode", x=x), branches(0.5)(x))
    assert torch.equal(program("prefill", x=torch.ones(16, 4)), branches(0.25)(torch.ones(16, 4)))


def test_a_branch_on_one_row_is_traced_apart() -> None:
    def branches(offset: float) -> Callable[..., Any]:
        return lambda x: gate(x, offset) * 3 if x.shape[0] == 1 else gate(x, offset)

    program = compiled(branches, buckets={"decode": [1, 4], "prefill": [1, 16]})
    assert served(program) == [
        ("decode", [4], ""),
        ("decode", [1], ""),
        ("prefill", [16], "decode"),
        ("prefill", [1], ""),
    ]
    check(program, branches)


def test_a_call_with_a_value_of_its_own_is_not_rebound() -> None:
    def twice(offset: float) -> Callable[..., Any]:
        return lambda x: gate(gate(x, offset), 0.125)

    program = compiled(twice)
    assert [name for _, _, name in served(program)] == ["", ""]
    check(program, twice)


def test_phases_with_other_constants_have_other_traces() -> None:
    def scaled(offset: float) -> Callable[..., Any]:
        def model(x: Tensor, scale: int = 1) -> Tensor:
            return gate(x, offset) * scale

        return model

    program = compiled(scaled, guards={"decode": {"scale": (1, 2)}})
    assert served(program) == [("decode", [4, 1], ""), ("decode", [4, 1], ""), ("prefill", [16], "decode")]
    x = torch.ones(4, 4)
    for scale in (1, 2):
        assert torch.equal(program("decode", x=x, guards={"scale": scale}), scaled(0.5)(x) * scale)
    assert torch.equal(program("prefill", x=x), scaled(0.25)(x))


def test_true_is_another_constant_than_one() -> None:
    def typed(offset: float) -> Callable[..., Any]:
        def model(x: Tensor, flag: Any = 1) -> Tensor:
            return gate(x, offset) + (10 if flag is True else 0)

        return model

    program = compiled(typed, guards={"decode": {"flag": (True,)}})
    assert [name for _, _, name in served(program)] == ["", ""]
    x = torch.ones(4, 4)
    assert torch.equal(program("decode", x=x, guards={"flag": True}), gate(x, 0.5) + 10)
    assert torch.equal(program("prefill", x=x), gate(x, 0.25))


def test_a_model_that_has_no_trace_at_other_sizes_keeps_those_it_has() -> None:
    def small_only(offset: float) -> Callable[..., Any]:
        def model(x: Tensor) -> Tensor:
            if x.shape[0] > 8:
                torch._dynamo.graph_break()
            return gate(x, offset)

        return model

    program = compiled(small_only, mode={"decode": "compile", "prefill": "off"})
    assert served(program) == [("decode", [4], ""), ("decode", [1], "")]
    check(program, small_only)
    with pytest.raises(TraceError):
        compiled(small_only, mode="compile")


def test_a_phase_that_can_not_be_captured_leaves_its_trace_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = GraphRunner.capture

    def refusing(self: GraphRunner, key: GraphKey, *args: Any, in_parts: bool, **options: Any) -> Any:
        if key.phase == "decode" and not in_parts:
            raise CaptureError("capturing decode", found="it reads on the host", remedy="leave it")
        return capture(self, key, *args, in_parts=in_parts, **options)

    monkeypatch.setattr(GraphRunner, "capture", refusing)
    shared = SharedTrace(op=SHARED.op, argument=SHARED.argument, values=OFFSETS)
    models = {phase: plain(offset) for phase, offset in OFFSETS.items()}
    device = acme(modes=("full", "segmented"))
    program = core.compile(models, device, inputs=ROWS, buckets=BUCKETS, options=core.CompileOptions(shared=shared))
    assert program.report().modes == {"decode": "segmented", "prefill": "full"}
    assert served(program) == [("prefill", [16], "")] and program.report().num_traces == 1
    check(program, plain)

    def scaled(offset: float) -> Callable[..., Any]:
        return lambda x, scale=1: gate(x, offset) * scale

    models = {phase: scaled(offset) for phase, offset in OFFSETS.items()}
    options = core.CompileOptions(shared=shared, guards={"scale": (1, 2)})
    program = core.compile(models, device, inputs=ROWS, buckets=BUCKETS, options=options)
    assert served(program) == [("prefill", [16], "")] * 2 and program.report().num_traces == 2


def test_the_passes_of_a_phase_leave_the_shared_graph_alone() -> None:
    traced = trace(plain(0.5), {"x": torch.zeros(16, 4)}, dynamic={"x": [0]}, least=1)
    before = traced.module.print_readable(print_output=False)
    bound = SHARED.for_phase(traced, "prefill")
    (node,) = SHARED._calls(bound.module)
    assert node.kwargs["up_offset"] == 0.25 and node.meta["example_value"] is not None
    bound.module.graph.erase_node(next(iter(reversed(bound.module.graph.nodes))))
    assert traced.module.print_readable(print_output=False) == before
    assert SHARED.calls_have(traced.module, 0.5) and not SHARED.calls_have(traced.module, 0.25)
    x = torch.ones(1, 4)
    assert torch.equal(copy_graph(traced.module)(*traced.values({"x": x}))[0], plain(0.5)(x))


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"op": "core::absent"}, ("'up_offset' of core::absent", "the canonical ops are: core::")),
        ({"argument": "gate"}, ("'gate' of core::gated_activation", "takes: kind, limit, up_offset")),
        ({"values": {"verify": 1.0}}, ("values for ['verify']", "phases ['decode', 'prefill']")),
    ],
)
def test_what_can_not_be_shared_is_refused(changes: dict[str, Any], phrases: tuple[str, ...]) -> None:
    fields = {"op": SHARED.op, "argument": SHARED.argument, "values": OFFSETS} | changes
    with refused(UsageError, *phrases):
        compiled(plain, shared=SharedTrace(**fields))
