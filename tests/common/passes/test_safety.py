"""core/common/passes/safety.py and metadata.py: what makes a site unsafe, each a near-miss with its reason."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.node_meta import value_of
from core.common.passes.context import PassContext
from core.common.passes.sites import MADE_BY, Finder, Site
from core.common.passes.writes import find_writes
from tests.common.passes.graphs import (
    NARROW,
    PUT,
    TALL,
    X,
    calls,
    doubled,
    fused,
    the_miss,
    traced,
    traced_graph,
)


def written_between(write: Callable[[Tensor], object]) -> Callable[..., Tensor]:
    def model(x: Tensor) -> Tensor:
        v = x + 0
        product = v * 2
        write(v)
        return product + v

    return model


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.add_(1),
        lambda v: v.view(-1).mul_(2),
        lambda v: v[:, 3].zero_(),
        lambda v: v.t()[0].copy_(v[0, 0]),
        lambda v: v.__setitem__(0, 1.0),
        lambda v: v.__iadd__(1),
        lambda v: torch.relu_(v),
        lambda v: nn.functional.relu(v, inplace=True),
        lambda v: torch.add(v, 1, out=v),
        lambda v: PUT(v, torch.tensor([0]), v[:1] * 2),
        lambda v: v.chunk(2)[1].fill_(0),
    ],
    ids=["method", "view", "slice", "transpose", "setitem", "iadd", "function", "inplace", "out", "schema", "chunk"],
)
def test_a_write_in_between_is_a_near_miss(write: Callable[[Tensor], object]) -> None:
    module = traced(written_between(write), X)
    text = str(module.graph)
    miss = the_miss(fused(module, doubled()))
    assert "written in between by" in miss.reason and miss.node in text
    assert str(module.graph) == text


def test_the_same_without_a_write_in_between_is_a_site() -> None:
    module = traced(written_between(lambda v: v.view(-1).sin()), X)
    assert fused(module, doubled()).matched == 1
    other = traced(written_between(lambda v: torch.zeros(3).add_(1)), X)
    assert fused(other, doubled()).matched == 1


def test_writes_before_and_after_do_not_hinder() -> None:
    def model(x: Tensor) -> Tensor:
        v = x + 0
        v.add_(1)
        w = v * 2 + v
        v.mul_(3)
        return w + v.sin()

    whole = traced_graph(model, X)
    values = whole.values({"x": X})
    before = whole.module(*values)[0].clone()
    assert fused(whole.module, doubled()).matched == 1
    assert torch.allclose(whole.module(*values)[0], before)


def test_a_node_used_elsewhere_stays_and_is_right() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x * 2
        return product + x, product.sin()

    whole = traced_graph(model, X)
    values = whole.values({"x": X})
    before = whole.module(*values)
    assert fused(whole.module, doubled()).matched == 1
    assert len(calls(whole.module, operator.mul)) == 1  # kept: sin needs it
    assert all(torch.allclose(a, b) for a, b in zip(whole.module(*values), before, strict=True))


def test_a_shared_cast_serves_two_sites_and_goes_with_the_last() -> None:
    """Two norms of one residual share the cast (parallel blocks): both are fused, the cast is gone."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x * 2
        return product + x, product + x

    module = traced(model, X)
    assert fused(module, doubled()).matched == 2
    assert calls(module, operator.mul) == []


def test_a_random_node_that_must_stay_is_not_repeated() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(x)
        return noise * 2 + noise, noise.sin()

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        (noise,) = (n for n in context.graph.nodes if n.target is torch.rand_like)
        return Site(anchor=node, target=torch.neg, args=noise.args, interior=(noise, *node.all_input_nodes, node))

    assert "has an effect and" in the_miss(fused(traced(model, X), find)).reason


def cached(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    cache = x.clone()
    cache.index_copy_(0, y, z)
    return cache * 2 + cache


CACHED = (X, torch.tensor([1, 2]), torch.ones(2, 16))


def replace_cache_write(target: Any, *, take: int = 3) -> Finder:
    """Offer to replace index_copy_, mul and add by one op that gets cache, index and rows."""

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        (copy,) = (n for n in context.graph.nodes if n.target == "index_copy_")
        cache, _, index, rows = copy.args
        (product,) = (n for n in context.graph.nodes if n.target is operator.mul)
        return Site(anchor=node, target=target, args=(cache, index, rows)[:take], interior=(copy, product, node))

    return find


def test_a_write_that_the_new_op_takes_over_goes() -> None:
    module = traced(cached, *CACHED)
    assert fused(module, replace_cache_write(PUT)).matched == 1
    assert calls(module, "index_copy_") == [] and len(calls(module, PUT)) == 1


def test_a_write_that_the_new_op_would_lose_is_a_near_miss() -> None:
    def model(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        cache = x.clone()
        cache.index_copy_(0, y, z)
        return cache * 2 + cache, cache.sin()

    miss = the_miss(fused(traced(model, *CACHED), replace_cache_write(torch.neg, take=1)))
    assert miss.reason == "the write of index_copy_ would be lost"


def test_a_read_between_the_old_and_the_new_write_is_a_near_miss() -> None:
    def model(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        cache = x.clone()
        cache.index_copy_(0, y, z)
        seen = cache.sin()
        return cache * 2 + cache, seen

    miss = the_miss(fused(traced(model, *CACHED), replace_cache_write(PUT)))
    assert miss.reason == "seen uses in between what the new op writes"


def test_a_write_that_was_not_there_is_a_near_miss() -> None:
    def model(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x[y] * 2 + z

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        x, y, z = (n for n in context.graph.nodes if n.op == "placeholder")
        return Site(anchor=node, target=PUT, args=(x, y, z), interior=(node,))

    miss = the_miss(fused(traced(model, *CACHED), find))
    assert miss.reason == "the new op would write where the matched nodes do not"


def test_a_result_that_shares_written_memory_is_a_near_miss() -> None:
    def model(x: Tensor) -> Tensor:
        v = x + 0
        w = v.view(4, 4, 4)
        v.add_(1)
        return w.sin()

    def find(context: PassContext, node: fx.Node) -> Site | None:
        return (
            Site(anchor=node, target=torch.neg, args=node.args[:1], interior=(node,)) if node.target == "view" else None
        )

    miss = the_miss(fused(traced(model, torch.ones(4, 16)), find))
    assert miss.reason == "the result shares memory with an input, and add_ writes it"


@pytest.mark.parametrize(
    ("target", "reason"),
    [(NARROW, "torch.float16 where the graph has torch.float32"), (torch.sum, "shape () where the graph has (4, 16)")],
)
def test_another_dtype_or_shape_is_a_near_miss(target: Any, reason: str) -> None:
    result = fused(traced(lambda x: x * 2 + x, X), lambda c, n: narrowed(doubled()(c, n), target))
    assert the_miss(result).reason == f"the new op gives {reason}"


def narrowed(site: Any, target: Any) -> Any:
    return replace(site, target=target, args=site.args[:1]) if isinstance(site, Site) else site


def test_strides_that_break_a_later_view_are_a_near_miss() -> None:
    broken = fused(traced(lambda x: (x * 2 + x).view(-1), X), lambda c, n: narrowed(doubled()(c, n), TALL))
    assert "do not allow" in the_miss(broken).reason
    fine = fused(traced(lambda x: (x * 2 + x).sin(), X), lambda c, n: narrowed(doubled()(c, n), TALL))
    assert fine.matched == 1


def test_views_of_a_result_still_share_its_memory() -> None:
    module = traced(lambda x: (x * 2 + x).view(-1).add_(1), X)
    assert fused(module, doubled()).matched == 1
    (new,) = calls(module, torch.mul)
    assert find_writes(module).writers(new) == tuple(calls(module, "add_"))
    other = traced(lambda x: (x * 2 + x).t().add_(1), X)
    assert fused(other, lambda c, n: narrowed(doubled()(c, n), TALL)).matched == 1
    (new,) = calls(other, TALL)
    assert value_of(new).stride() == (1, 4) and value_of(*calls(other, "t")).stride() == (4, 1)
    assert find_writes(other).writers(new) == tuple(calls(other, "add_"))


def test_an_inlined_replacement_shares_memory_with_later_views_too() -> None:
    module = traced(lambda x: (x * 2 + x).view(-1).add_(1), X)
    inlined = fx.symbolic_trace(lambda v: (v + 1) * 3 - 3)
    assert fused(module, lambda c, n: narrowed(doubled()(c, n), inlined)).matched == 1
    (new,) = calls(module, operator.sub)
    assert find_writes(module).writers(new) == tuple(calls(module, "add_"))
    assert all(value_of(node) is not None for node in module.graph.nodes if node.op.startswith("call_"))


def test_a_replacement_may_give_its_input() -> None:
    module = traced(lambda x: (x * 2 + x).sin(), X)
    assert fused(module, lambda c, n: narrowed(doubled()(c, n), fx.symbolic_trace(lambda v: v))).matched == 1
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_method", "output"]
    assert all(MADE_BY not in node.meta for node in module.graph.nodes)


@pytest.mark.parametrize("read_early", [False, True])
def test_memory_that_is_filled_is_replaced_where_nothing_reads_it_before(read_early: bool) -> None:
    def model(x: Tensor) -> Tensor:
        buffer = torch.zeros_like(x)
        early = buffer * 2 if read_early else x
        filled = x.sin()
        buffer.copy_(filled)
        return buffer + early

    def find(_: PassContext, node: fx.Node) -> Site | None:
        if node.target != "copy_":
            return None
        buffer, filled = node.args
        assert isinstance(buffer, fx.Node) and isinstance(filled, fx.Node)
        return Site(anchor=buffer, target=torch.mul, args=(filled, 1), interior=(buffer, node))

    module = traced(model, X)
    if read_early:
        assert "early reads buffer before it is filled" in the_miss(fused(module, find)).reason
    else:
        assert fused(module, find).matched == 1
        assert torch.equal(module(X)[0], X.sin() + X)


def test_an_input_computed_too_late_is_a_near_miss() -> None:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        site = doubled()(context, node)
        late = next(n for n in context.graph.nodes if n.target == "sin")
        return replace(site, args=(late, 3)) if isinstance(site, Site) else None

    def model(x: Tensor) -> Tensor:
        w = x * 2 + x
        return x.sin() + w.cos()

    assert "is computed after" in the_miss(fused(traced(model, X), find)).reason
