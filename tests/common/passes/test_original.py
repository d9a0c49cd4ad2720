"""core/common/passes/original.py: a lifted op that no device implements becomes again what it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, fx

from core.common.ops.implementation import OpImplementation
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.original import ORIGINAL
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace

X, Y = torch.linspace(-2, 3, 40).view(5, 8), torch.linspace(1, -4, 40).view(5, 8)
WEIGHT = torch.linspace(0.5, 1.5, 8)


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return WEIGHT * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def block(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return norm(total) * 2, total


def lifted(dtype: torch.dtype = torch.float32, **options: object) -> tuple[TracedGraph, dict[str, Tensor]]:
    inputs = {"x": X.to(dtype), "y": Y.to(dtype)}
    graph = trace(block, inputs, **options)  # type: ignore[arg-type]
    PassManager((LIFT_RMS_NORM, FUSE_ADD_RMS_NORM), strict=True).run(graph.module)
    return graph, inputs


def targets(graph: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))


def op_nodes(graph: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target is target]


@contextmanager
def counted() -> Iterator[tuple[OpImplementation, list[int]]]:
    calls: list[int] = []

    def fn(*args: object, **kwargs: object) -> Tensor:
        calls.append(1)
        result: Tensor = RMS_NORM.reference(*args, **kwargs)
        return result

    yield OpImplementation(op="core::rms_norm", name="counting", fn=fn), calls


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [None, {"x": (0,), "y": (0,)}], ids=["static", "dynamic"])
def test_without_an_implementation_the_graph_is_what_it_was(dtype: torch.dtype, dynamic: object) -> None:
    graph, inputs = lifted(dtype, dynamic=dynamic)
    assert len(op_nodes(graph.module, ADD_RMS_NORM.overload)) == 1
    choices = choose_implementations(graph.module, ())
    # The fused op falls apart into add and norm, and the norm into its nodes.
    assert [(c.op, c.implementation) for c in choices] == [
        ("core::add_rms_norm", "original"),
        ("core::rms_norm", "original"),
    ]
    untouched = trace(block, inputs, dynamic=dynamic)  # type: ignore[arg-type]
    assert targets(graph.module) == targets(untouched.module)
    graph.module.graph.lint()
    expected = untouched.module(*untouched.values(inputs))
    for result, wanted in zip(graph.module(*graph.values(inputs)), expected, strict=True):
        assert torch.equal(result, wanted)


def test_what_a_fused_op_is_made_of_may_have_an_implementation() -> None:
    graph, inputs = lifted()
    with counted() as (implementation, calls):
        choices = choose_implementations(graph.module, [implementation])
        graph.module(*graph.values(inputs))
    assert [(c.op, c.implementation) for c in choices] == [
        ("core::add_rms_norm", "original"),
        ("core::rms_norm", "counting"),
    ]
    assert len(calls) == 1


def test_an_op_whose_arguments_were_changed_since_is_its_reference() -> None:
    graph, inputs = lifted()
    (node,) = op_nodes(graph.module, ADD_RMS_NORM.overload)
    node.args = (*node.args[:3], 0.5)
    (choice,) = choose_implementations(graph.module, ())
    assert choice.implementation == "reference"
    result = graph.module(*graph.values(inputs))[0]
    torch.testing.assert_close(result, 2 * WEIGHT * (X + Y) / ((X + Y).pow(2).mean(-1, keepdim=True) + 0.5).sqrt())


def test_inputs_that_later_passes_replace_are_followed() -> None:
    graph, inputs = lifted()
    (node,) = op_nodes(graph.module, ADD_RMS_NORM.overload)
    x = node.all_input_nodes[0]
    with graph.module.graph.inserting_before(node):
        doubled = graph.module.graph.call_function(torch.mul, (x, 2))
    node.replace_input_with(x, doubled)
    doubled.meta = dict(x.meta)
    assert choose_implementations(graph.module, ())[0].implementation == "original"
    result = graph.module(*graph.values(inputs))[1]
    first, second = (X, Y) if x.name.endswith("x_") else (Y, X)
    assert torch.equal(result, first * 2 + second)


def test_an_op_that_was_no_lift_has_no_original() -> None:
    graph = trace(lambda x: RMS_NORM.overload(x, WEIGHT, 1e-5), {"x": X})
    (node,) = op_nodes(graph.module, RMS_NORM.overload)
    assert ORIGINAL not in node.meta
    assert choose_implementations(graph.module, ())[0].implementation == "reference"
