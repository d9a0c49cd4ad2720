"""core/common/passes/viewed.py: an op takes and gives nodes in its own layout, and none of that is left without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.node_meta import value_of
from core.common.ops.norm import ADD_RMS_NORM, RMS_NORM
from core.common.passes import Index, NearMiss, PassContext, Site, Swap, Viewed, view
from core.common.passes.viewed import Step, ends, insert
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.snapshot import to_text
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core.verify.regions import find_regions
from tests.common.passes.graphs import ADD_RMS, calls, find_add_rms, fused, fusion, the_miss, traced
from tests.support import refused

SIZE = 8
X = torch.randn(1, 5, 3, SIZE, generator=torch.Generator().manual_seed(8))
HEADS_FIRST = (Index((0,)), Swap(0, 1))
WEIGHT = torch.linspace(0.3, 1.7, SIZE)


@pytest.mark.parametrize(
    ("step", "real"),
    [
        (Swap(1, 3), lambda x: x.transpose(1, 3)),
        (Index((0,)), lambda x: x[0]),
        (Index((None,)), lambda x: x[None]),
        (Index((0, slice(None), None)), lambda x: x[0, :, None]),
        (Index((None, None, 0)), lambda x: x[None, None, 0]),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_step_gives_what_torch_gives_and_its_inverse_takes_it_back(
    step: Step, real: Callable[[Tensor], Tensor]
) -> None:
    with FakeTensorMode():
        base = torch.empty(1, 5, 3, 8).transpose(2, 3)
        wanted = real(base)
    got = step.of(base)
    assert got.shape == wanted.shape and got.untyped_storage()._cdata == base.untyped_storage()._cdata
    strides = [(a, b) for size, a, b in zip(got.shape, got.stride(), wanted.stride(), strict=True) if size != 1]
    assert all(a == b for a, b in strides)
    assert step.inverse.of(got).shape == base.shape and step.inverse.inverse == step


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Find a norm of rows, and give it and take it from the op with the heads first."""
    if view.kind(node) != "rms_norm":
        return None
    x, _, weight, eps = node.args
    return Site(
        anchor=node,
        target=RMS_NORM.overload,
        args=(Viewed(x, HEADS_FIRST), weight, eps),
        interior=(node,),
        outputs=(Viewed(node, HEADS_FIRST),),
    )


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x.sin(), (SIZE,), WEIGHT, 1e-5).cos()


def listed(module: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return what each node of a graph does and gives, by places in place of names."""
    places: dict[Any, Any] = {node: place for place, node in enumerate(module.graph.nodes)}
    return [
        (node.op, node.target, str(fx.map_arg((node.args, dict(node.kwargs)), places.__getitem__)), str(value_of(node)))
        for node in module.graph.nodes
    ]


def rewritten(model: Callable[[Tensor], Any], **options: Any) -> tuple[TracedGraph, list[tuple[Any, ...]]]:
    """Return the graph of a model after the pass, and a list of what it was before; no bit may have changed."""
    graph = trace(lambda x: model(x), {"x": X}, **options)
    values, text = graph.values({"x": X}), listed(graph.module)
    before = graph.module(*values)[0]
    (report,) = PassManager([fusion(find)], strict=True).run(graph.module)
    assert report.matched == 1 and torch.equal(graph.module(*values)[0], before)
    return graph, text


@pytest.mark.parametrize("dynamic", [None, {"x": [1]}], ids=["fixed", "open"])
def test_the_op_sees_its_own_layout_and_the_graph_the_models(dynamic: Any) -> None:
    graph, _ = rewritten(normed, dynamic=dynamic)
    (op,) = calls(graph.module, RMS_NORM.overload)
    assert isinstance(op.args[0], fx.Node)
    assert value_of(op).shape == value_of(op.args[0]).shape == (3, value_of(op).shape[1], SIZE)
    (cos,) = calls(graph.module, "cos")
    (end,) = ends(op, Viewed(op, HEADS_FIRST).way_back)
    assert cos.args[0] is end and value_of(end).shape == value_of(cos).shape


@pytest.mark.parametrize("dynamic", [None, {"x": [1]}], ids=["fixed", "open"])
def test_without_the_op_the_graph_is_node_for_node_what_it_was(dynamic: Any) -> None:
    graph, before = rewritten(normed, dynamic=dynamic)
    (choice,) = choose_implementations(graph.module, ())
    assert choice.implementation == "original" and listed(graph.module) == before


def test_what_reads_the_ops_own_layout_by_then_gets_a_view_of_what_is_put_back() -> None:
    graph, _ = rewritten(normed)
    values = graph.values({"x": X})
    (op,) = calls(graph.module, RMS_NORM.overload)
    (output,) = graph.module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], op),)  # type: ignore[misc]  # a tuple of nodes
    graph.module.recompile()
    first = graph.module(*values)
    choose_implementations(graph.module, ())
    assert not calls(graph.module, RMS_NORM.overload) and first[1].shape == (3, 5, SIZE)
    assert all(map(torch.equal, graph.module(*values), first))


def test_a_view_that_the_model_has_made_is_not_made_back_and_forth() -> None:
    graph, before = rewritten(lambda x: F.rms_norm(x.sin().sum(0).transpose(0, 1)[None], (SIZE,), WEIGHT, 1e-5))
    (op,), (total,) = calls(graph.module, RMS_NORM.overload), calls(graph.module, "sum")
    assert op.args[0] is total
    choose_implementations(graph.module, ())
    assert listed(graph.module) == before


def test_an_index_of_a_larger_dimension_is_no_view_to_take_back() -> None:
    module = traced(lambda x: x[0].sin(), torch.ones(2, 3))
    (row,) = [node for node in module.graph.nodes if view.kind(node) == "getitem"]
    made: list[fx.Node] = []
    with module.graph.inserting_after(row):
        back = insert(Viewed(row, (Index((None,)),)), lambda node, value: made.append(node))
    assert made == [back] and back.args[0] is row


def test_verification_sees_the_site_with_its_views() -> None:
    graph = trace(lambda x: normed(x), {"x": X})
    before = trace(lambda x: normed(x), {"x": X}).module
    PassManager([fusion(find)], strict=True).run(graph.module)
    (region,) = find_regions("fuse_rms", before, graph.module)
    assert region.sources_after == region.sources_before
    values = [WEIGHT if "weight" in name else X for name in region.sources_before]
    assert torch.equal(region.before(*values)[0], region.after(*values)[0])


def test_views_are_refused_on_graphs_that_could_not_hold_them() -> None:
    graph = trace(lambda x: normed(x), {"x": X})
    with refused(PassError, "views of nodes", "stage 'torch'", "'aten'"):
        fused(graph.module, find, stage="aten")


def test_a_result_that_nothing_reads_has_no_node_and_is_no_hindrance() -> None:
    def both(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        site = find_add_rms(context, node)
        return replace(site, outputs=(site.anchor, None)) if isinstance(site, Site) else site

    x, weight = torch.ones(4, 16), torch.linspace(0.3, 1.7, 16)

    def model(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        wide = total.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    module = traced(model, x, x * 0.3)
    result = fused(module, both)
    (op,) = calls(module, ADD_RMS)
    assert result.matched == 1 and [user.args[1] for user in op.users] == [0]
    assert all(isinstance(value, Tensor) for value in value_of(op))


def test_a_refused_site_leaves_every_node_as_it_was() -> None:
    def model(x: Tensor) -> Tensor:
        rows = x.sin()
        result = F.rms_norm(rows, (SIZE,), WEIGHT, 1e-5)
        rows.add_(1)
        return result + rows

    def late(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        site = find(context, node)
        return replace(site, anchor=node, interior=(*node.users, node)) if isinstance(site, Site) else site

    graph = trace(lambda x: model(x), {"x": X})
    text = to_text(graph.module)
    result = fused(graph.module, late)
    assert result.matched == 0 and the_miss(result).reason and to_text(graph.module) == text


@pytest.mark.parametrize("steps", [(), (Index((0,)),)], ids=["as it is", "through one view"])
def test_an_input_that_the_op_takes_several_times_is_put_back_once(steps: tuple[Step, ...]) -> None:
    """Twice alike, and a third time through another view."""

    def find_several(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        if view.kind(node) != "rms_norm":
            return None
        x, _, _, eps = node.args
        rows, row = Viewed(x, steps), Viewed(x, (Index((0, 0)),))
        return Site(
            anchor=node,
            target=ADD_RMS_NORM.overload,
            args=(rows, rows, row, eps),
            interior=(node,),
            outputs=(Viewed(node, steps), None),
        )

    def model(x: Tensor) -> Tensor:
        return F.rms_norm(x.sin(), (SIZE,), None, 1e-5)

    graph = trace(lambda x: model(x), {"x": X[:, 0, :1]})
    before = listed(graph.module)
    assert fused(graph.module, find_several).matched == 1
    choose_implementations(graph.module, ())
    assert listed(graph.module) == before
