"""core/common/passes/collective/lift.py: what torch.distributed traces to becomes canonical ops, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, distributed, nn

from core.common.ops.collective.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from core.common.passes.collective.lift import LIFT_COLLECTIVES
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.snapshot import to_text
from core.compilation.trace.tracing import trace
from tests.common.passes.collective import layers
from tests.common.passes.graphs import to_aten
from tests.common.processes import drawn, pretended

X = drawn(4, 16, seed=3)
W = drawn(16, 16, seed=4)


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    with pretended() as name:
        yield name


def lifted(function: Any, *, aten: bool = False) -> tuple[Any, Any]:
    graph = trace(lambda x: function(x), {"x": X})
    if aten:
        from dataclasses import replace

        from core.compilation.rewrite.aten import to_aten as aten_of

        graph = replace(graph, module=aten_of(graph.module))
    return graph, layers.rewritten(graph, (LIFT_COLLECTIVES,))["lift_collectives"]


def calls(graph: Any, target: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if node.target is target.overload]


def left(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target) or "copy_" in str(node.target)]


@pytest.mark.parametrize("aten", [False, True], ids=["dynamo", "aten"])
@pytest.mark.parametrize("reduce", [layers.in_place, layers.functional], ids=["in place", "functional"])
def test_an_all_reduce_is_one_op_in_both_spellings_and_stages(reduce: Any, aten: bool, group: str) -> None:
    graph, report = lifted(lambda x: reduce(x @ W).sin() + 1, aten=aten)
    assert (report.matched, report.near_misses, left(graph.module)) == (1, (), [])
    (node,) = calls(graph.module, ALL_REDUCE)
    assert node.args[1] == group and [user.name for user in node.users] == ["sin"]


def test_what_no_implementation_takes_becomes_what_it_was() -> None:
    graph, report = lifted(lambda x: layers.in_place(x @ W).sin())
    plain = trace(lambda x: layers.in_place(x @ W).sin(), {"x": X}).module
    (choice,) = choose_implementations(graph.module, ())
    assert report.matched == 1 and choice.implementation == "original"
    assert left(graph.module) == left(plain) and len(left(plain)) == 3


def test_the_other_collectives_over_tokens_are_lifted_too(group: str) -> None:
    world = distributed.group.WORLD

    def function(x: Tensor) -> Tensor:
        part = functional_collectives.reduce_scatter_tensor(x @ W, "sum", 0, world)
        return functional_collectives.all_gather_tensor(part.sin(), 0, world) + 1

    graph, report = lifted(function)
    assert (report.matched, left(graph.module)) == (2, [])
    for op in (REDUCE_SCATTER, ALL_GATHER):
        (node,) = calls(graph.module, op)
        assert node.args[1:] == (group,)


def test_dtensor_gives_all_reduces_on_aten_graphs() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    graph = to_aten(lambda x: model(x).sin(), X)
    from core.compilation.rewrite.manager import PassManager

    (report,) = PassManager([LIFT_COLLECTIVES], strict=True).run(graph)
    assert report.matched == 1 and len(calls(graph, ALL_REDUCE)) == 1, to_text(graph)


def several(x: Tensor) -> Tensor:
    pending = torch.ops._c10d_functional.all_reduce(x @ W, "sum", distributed.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(pending) + pending


def reduced(how: str) -> Any:
    def function(x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x @ W, how, distributed.group.WORLD) + 1

    return function


def seen_by_a_view(x: Tensor) -> Tensor:
    y = x @ W
    row = y[0]
    distributed.all_reduce(y)
    return y.sin() + row


def gathered(x: Tensor) -> Tensor:
    return functional_collectives.all_to_all_single(x, [2, 2], [2, 2], distributed.group.WORLD) + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (several, "is used otherwise than in one wait"),
        (reduced("max"), "reduces by 'max', not by 'sum'"),
        (reduced("avg"), "reduces by 'avg', not by 'sum'"),
        (seen_by_a_view, "would be lost"),
        (gathered, "all_to_all_single has no canonical op"),
    ],
    ids=["two readers of what is pending", "maximum", "mean", "a view sees the write", "another collective"],
)
def test_others_stay_as_they_are_with_the_reason(function: Any, reason: str) -> None:
    plain = to_text(trace(lambda x: function(x), {"x": X}).module)
    graph, report = lifted(function)
    assert report.matched == 0 and reason in layers.reasons(report)
    assert to_text(graph.module) == plain


def test_an_input_that_is_reduced_in_place_is_no_site() -> None:
    """The caller sees the write, so it stays."""
    graph = trace(lambda x: layers.in_place(x).sin(), {"x": X}, writable=("x",))
    report = layers.rewritten(graph, (LIFT_COLLECTIVES,))["lift_collectives"]
    assert report.matched == 0 and "would be lost" in layers.reasons(report) and "copy_" in left(graph.module)


def test_in_a_job_of_one_process_it_does_not_run() -> None:
    graph = trace(lambda x: layers.in_place(x @ W).sin(), {"x": X})
    report = layers.rewritten(graph, (LIFT_COLLECTIVES,), world_size=1)["lift_collectives"]
    assert report.skipped == "it is for 2 or more processes, and this graph is for 1"
