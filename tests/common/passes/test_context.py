"""core/common/passes/context.py, effects.py and writes.py: analyses, aliasing writes, and what may be removed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.node_meta import value_of
from core.common.passes.context import ANALYSES, Analyses, PassContext
from core.common.passes.effects import is_impure, written_args
from core.common.passes.rewrite import remove_dead
from core.common.passes.writes import Writes, find_writes
from core.errors import UsageError
from tests.common.passes.graphs import PUT, RMS, STORE, calls, to_aten, traced
from tests.support import refused

X = torch.ones(4, 6)


def graph_of(*calls: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Build a graph without values on inputs x, y from (op, target, args, kwargs), where "x" and "y" mean these."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "y")}
    nodes = [graph.create_node(op, target, *_replaced(inputs, args, kwargs)) for op, target, args, kwargs in calls]
    graph.output(inputs["x"])
    return fx.GraphModule(nn.Module(), graph), nodes


def _replaced(inputs: Mapping[str, fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(inputs.get(str(a), a) for a in args), {k: inputs.get(str(a), a) for k, a in kwargs.items()}


def one(op: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return graph_of((op, target, args, kwargs))[1][0]


def foreign(x: Tensor) -> Tensor:
    return x


WRITING = [
    one("call_method", "add_", "x", 1),
    one("call_method", "index_copy_", "x", 0, "y", "y"),
    one("call_method", "__setitem__", "x", 0, "y"),
    one("call_method", "__iadd__", "x", "y"),
    one("call_function", operator.setitem, "x", 0, "y"),
    one("call_function", operator.iadd, "x", "y"),
    one("call_function", torch.relu_, "x"),
    one("call_function", torch.Tensor.add_, "x", 1),
    one("call_function", nn.functional.relu, "x", True),
    one("call_function", nn.functional.relu, "x", inplace=True),
    one("call_function", torch.add, "y", 1, out="x"),
    one("call_function", torch.ops.aten.add_.Tensor, "x", "y"),
    one("call_function", torch.ops.aten.index_put_.default, "x", ["y"], "y"),
    one("call_function", torch.ops.aten.add.out, "y", "y", out="x"),
    one("call_function", PUT, "x", "y", "y"),
    one("call_function", torch.ops.passes_test.put, "x", "y", "y"),
    one("call_function", STORE, cache="x", rows="y"),
]
PURE = [
    one("call_method", "add", "x", 1),
    one("call_method", "view", "x", -1),
    one("call_method", "size", "x", 0),
    one("call_function", operator.add, "x", "y"),
    one("call_function", operator.getitem, "x", 0),
    one("call_function", torch.rsqrt, "x"),
    one("call_function", torch.arange, 4),
    one("call_function", nn.functional.silu, "x"),
    one("call_function", nn.functional.linear, "x", "y"),
    one("call_function", nn.functional.scaled_dot_product_attention, "x", "x", "x"),
    one("call_function", nn.functional.dropout, "x", p=0.5, training=False),
    one("call_function", torch.Tensor.add, "x", 1),
    one("call_function", torch.ops.aten.mul.Tensor, "x", "y"),
    one("call_function", RMS, "x", "y", 1e-5),
    one("call_function", getattr, "x", "shape"),
]
FUNCTORCH: Any = torch._C._functorch
IMPURE_WITHOUT_WRITING = [
    one("call_function", FUNCTORCH._vmap_increment_nesting, 4, "error"),
    one("call_function", FUNCTORCH._vmap_decrement_nesting),
    one("call_function", torch._C._set_grad_enabled, False),
    one("call_function", torch.ops._c10d_functional.all_reduce.default, "x", "sum", "0"),
    one("call_function", torch.ops._c10d_functional.wait_tensor.default, "x"),
    one("call_function", torch.ops.aten._assert_async.msg, "x", "m"),
    one("call_function", torch.rand, 4),
    one("call_function", torch.ops.aten.bernoulli.default, "x"),
    one("call_function", nn.functional.dropout, "x", p=0.5),
    one("call_function", print, "x"),
    one("call_method", "unheard_of", "x"),
]


@pytest.mark.parametrize("node", WRITING, ids=lambda node: f"{node.op}-{node.name}")
def test_writes_are_seen_and_never_removed(node: fx.Node) -> None:
    assert [written.name for written in written_args(node)] == ["x"]
    assert is_impure(node)
    assert remove_dead(node.graph) == 0


@pytest.mark.parametrize("node", PURE, ids=lambda node: f"{node.op}-{node.name}")
def test_pure_nodes_go_where_nothing_uses_them(node: fx.Node) -> None:
    assert written_args(node) == () and not is_impure(node)
    assert remove_dead(node.graph) == 1


@pytest.mark.parametrize("node", IMPURE_WITHOUT_WRITING, ids=lambda node: f"{node.op}-{node.name}")
def test_other_effects_stay(node: fx.Node) -> None:
    assert is_impure(node)
    assert remove_dead(node.graph) == 0


def test_an_unknown_callable_may_write_anything() -> None:
    node = one("call_function", foreign, "x", "y")
    assert [written.name for written in written_args(node)] == ["x", "y"] and is_impure(node)


def kv(x: Tensor) -> Tensor:
    cache, count = torch.zeros(8, 6), torch.zeros(1)
    cache.index_copy_(0, torch.arange(4), x)
    count.add_(1)
    cache[5] = 2.0
    cache.view(-1)[0].mul_(3)
    PUT(cache, torch.tensor([7]), x[:1])
    return cache * count


def test_dead_code_removal_never_loses_a_write() -> None:
    module = traced(kv, X)
    node = next(n for n in module.graph.nodes if n.target == "index_copy_")
    with module.graph.inserting_after(node):
        module.graph.call_function(torch.neg, (node,))
    before = module(X)[0]
    assert remove_dead(module.graph) >= 1
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(X)[0], before)
    # What torch would do instead, and why ours exists:
    module.graph.eliminate_dead_code()
    module.recompile()
    assert not torch.equal(module(X)[0], before)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.view(-1),
        lambda base: base[:, 2],
        lambda base: base.t().unsqueeze(0)[0],
        lambda base: base.chunk(2)[1],
        lambda base: base.reshape(-1),
        lambda base: base.to(torch.float32),
        lambda base: base.detach(),
    ],
)
def test_a_write_to_a_view_is_one_to_its_base(view: Callable[[Tensor], Tensor]) -> None:
    def model(x: Tensor) -> Tensor:
        base = x + 0
        view(base).add_(1)
        return base

    module = traced(model, X)
    writes = find_writes(module)
    base, writer = calls(module, operator.add)[0], calls(module, "add_")[0]
    assert writes.writers(base) == (writer,)
    assert writes.writers(*module.graph.find_nodes(op="placeholder")) == ()


@pytest.mark.parametrize(
    "copy", [lambda x: x.clone(), lambda x: x * 1, lambda x: x.to(torch.float16), lambda x: x[:, [1]]]
)
def test_a_write_to_a_copy_is_none_to_its_source(copy: Callable[[Tensor], Tensor]) -> None:
    module = traced(lambda x: copy(x).add_(1), X)
    assert find_writes(module).writers(*module.graph.find_nodes(op="placeholder")) == ()


def test_what_a_canonical_op_returns_is_no_view_of_what_it_writes() -> None:
    """Else an op that reads the result could not take in a node before the op: a write would lie between."""
    from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE

    def model(x: Tensor, states: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = CAUSAL_CONV1D_UPDATE.overload(x, states + 0, weight)
        return out + 1

    module = traced(model, torch.ones(2, 4), torch.ones(2, 4, 3), torch.ones(4, 3))
    (call,) = calls(module, CAUSAL_CONV1D_UPDATE.overload)
    writes = find_writes(module)
    assert writes.writers(call) == () and writes.written[call]


def test_views_are_known_after_aotautograd_too() -> None:
    module = to_aten(lambda x: x.view(-1).sin().t().cos(), X)
    (view,) = calls(module, torch.ops.aten.view.default)
    (source,) = module.graph.find_nodes(op="placeholder")
    writes = find_writes(module)
    assert value_of(view) is view.meta["val"]
    assert writes.of(view) == writes.of(source) != writes.of(*calls(module, torch.ops.aten.sin.default))


def test_without_values_whatever_may_be_a_view_is_one() -> None:
    module, (view, fresh, writer) = graph_of(
        ("call_method", "reshape", ("x", -1), {}),
        ("call_function", operator.mul, ("x", 2), {}),
        ("call_method", "add_", ("x", 1), {}),
    )
    writes = find_writes(module)
    assert writes.writers(view) == (writer,) and writes.writers(fresh) == ()


def test_analyses_are_computed_once_and_invalidated() -> None:
    module = traced(torch.sin, X)
    analyses = Analyses(module)
    context = PassContext(module=module, analyses=analyses)
    assert isinstance(context.analysis("writes"), Writes)
    assert context.analysis("writes") is context.analysis("writes")
    assert context.analysis("order")[next(iter(module.graph.nodes))] == 0
    assert analyses.num_computed == 2
    kept = context.analysis("order")
    analyses.invalidate(frozenset({"order"}))
    assert context.analysis("order") is kept and analyses.num_computed == 2
    context.analysis("writes")
    assert analyses.num_computed == 3


def test_an_unknown_analysis_is_refused() -> None:
    with refused(UsageError, "analyses ['colour']", ", ".join(sorted(ANALYSES))):
        PassContext(module=traced(torch.sin, X)).analysis("colour")


def test_values_come_from_dynamo_or_aotautograd() -> None:
    assert value_of(3) is None
    module = traced(lambda x: x.chunk(2)[0].sin(), X)
    shapes = [tuple(value.shape) for value in PassContext(module=module).values() if isinstance(value, Tensor)]
    assert shapes.count((2, 6)) == 4  # two chunks, the item, its sine
