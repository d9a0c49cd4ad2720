"""core/common/passes/mlp/gate_up.py: the gate reads a merged projection whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.passes.linear.merge import MERGE_LINEARS
from core.common.passes.mlp.gate_up import FUSE_GATE_UP
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from tests.common.passes.linear.merging import Decoder, constants_of, tokens

DTYPES = [torch.float32, torch.bfloat16]
GATE = GATED_ACTIVATION.overload


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_of_merged_projections_reads_them_whole(dtype: torch.dtype) -> None:
    x = tokens(dtype)
    graph = trace(Decoder(2, dtype=dtype), {"x": x})
    constants = constants_of(graph)
    passes = [LIFT_GATED_ACTIVATION, MERGE_LINEARS]
    PassManager(passes, strict=True).run(graph.module, constants=constants)
    values = [*graph.values({"x": x}), *(tensor for _, tensor in constants.added)]
    before = run_graph(graph.module, values).outputs[0]
    assert len(calls(graph.module, torch.split)) == 4
    # Order is declared: given the other way round, they run the right way round.
    reports = PassManager([FUSE_GATE_UP, *passes], strict=True).run(graph.module, constants=constants)
    assert [report.matched for report in reports if report.name == "fuse_gate_up"] == [2]
    assert not calls(graph.module, GATE) and len(calls(graph.module, torch.split)) == 2
    assert all(node.kwargs["gate_first"] for node in calls(graph.module, GATED_ACTIVATION_FUSED.overload))
    assert torch.equal(run_graph(graph.module, values).outputs[0], before)


def fused(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[fx.GraphModule, PassReport]:
    graph = trace(function, {"x": x})
    before = run_graph(graph.module, [x]).outputs[0]
    (report,) = PassManager([FUSE_GATE_UP], strict=True).run(graph.module)
    assert torch.equal(run_graph(graph.module, [x]).outputs[0], before)
    return graph.module, report


def split(x: Tensor, sizes: Any, dim: int = -1) -> tuple[Tensor, ...]:
    return tuple(torch.split(x, sizes, dim))


@pytest.mark.parametrize(
    ("implemented", "matched"),
    [
        ({"core::gated_activation"}, 0),
        ({"core::gated_activation", "core::gated_activation_fused"}, 1),
        ({"core::gated_activation_fused"}, 1),
        (set(), 1),
    ],
)
def test_a_kernel_for_two_tensors_is_not_taken_its_work(implemented: set[str], matched: int) -> None:
    def function(x: Tensor) -> Tensor:
        return gate(*split(x, [32, 32]))

    graph = trace(function, {"x": tokens(torch.float32)})
    (report,) = PassManager([FUSE_GATE_UP], implemented=frozenset(implemented)).run(graph.module)
    assert report.matched == matched
    assert [miss.reason for miss in report.near_misses] == (
        [] if matched else ["the device implements the activation of two tensors, and not the one of a merged result"]
    )


def test_options_of_the_gate_are_kept() -> None:
    def function(x: Tensor) -> Tensor:
        up, gate = split(x, [32, 32])
        out: Tensor = GATE(gate, up, kind="quick_gelu", limit=7.0, up_offset=1.0)
        return out

    module, report = fused(function, tokens())
    assert report.matched == 1
    (node,) = calls(module, GATED_ACTIVATION_FUSED.overload)
    options = {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0, "gate_first": False, "interleaved": False}
    assert node.kwargs == options


def gate(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = GATE(gate, up, kind="silu")
    return out


NEAR: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "two of three parts": (lambda x: gate(*split(x, [16, 16, 32])[:2]), "not its halves"),
    "halves of another dimension": (lambda x: gate(*split(x, [1, 1], 0)), "not its halves"),
    "two tensors": (lambda x: gate(x.sin(), x.cos()), ""),
    "two results of an op": (lambda x: gate(*torch.aminmax(x, dim=-1, keepdim=True)), ""),
    "one half twice": (lambda x: (lambda part: gate(part, part))(split(x, [32, 32])[0]), "not its halves"),
}


@pytest.mark.parametrize("case", NEAR)
def test_other_parts_are_left_alone(case: str) -> None:
    function, reason = NEAR[case]
    module, report = fused(lambda x: function(x), tokens())
    assert report.matched == 0 and len(calls(module, GATE)) == 1
    assert [reason in miss.reason for miss in report.near_misses] == ([True] if reason else [])
