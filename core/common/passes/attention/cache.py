"""Let attention write the key/value cache that it attends over: two `index_copy_` and the op become one op.

The op writes the same values at the place where attention reads them; a reader between write and op is a near-miss.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.ops.attention import DENSE_ATTENTION
from core.common.passes import NearMiss, Pass, PassContext, PassResult, Site, apply_sites, near_miss, same_sizes, view


@dataclass(frozen=True, slots=True)
class _Write:
    """`cache[:, :, positions] = new`, by this node."""

    node: fx.Node
    cache: fx.Node
    positions: fx.Node
    new: fx.Node


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return an attention over a whole cache together with the two writes before it, or why they can't be fused."""
    if node.target is not DENSE_ATTENTION.overload or len(node.args) != 3 or node.kwargs.get("key_cache") is not None:
        return None
    query, key, value = node.args
    writers = [_last_writer(context, operand, node) for operand in (key, value)]
    if writers == [None, None]:
        return None
    writes = []
    for operand, writer in zip((key, value), writers, strict=True):
        found = None if writer is None else _write(writer)
        if found is None or operand not in (found.cache, found.node):
            return near_miss(node, f"{operand} is not a cache that was written along its tokens by one index_copy_")
        writes.append(found)
    keys, values = writes
    if keys.positions is not values.positions:
        return near_miss(node, f"keys are written at {keys.positions}, values at {values.positions}")
    if node.kwargs.get("causal") or node.kwargs.get("window"):
        return near_miss(node, "what a token sees counts from the first row, not from its position in the cache")
    caches = {"key_cache": keys.cache, "value_cache": values.cache, "positions": keys.positions}
    return Site(
        anchor=node,
        target=DENSE_ATTENTION.overload,
        args=(query, keys.new, values.new),
        kwargs={**node.kwargs, **caches},
        interior=(keys.node, values.node, node),
    )


def _last_writer(context: PassContext, operand: Any, node: fx.Node) -> fx.Node | None:
    """Return the last write to the caller's tensor that holds an operand; None for tensors made in the graph."""
    writes, order = context.analysis("writes"), context.analysis("order")
    kept = (holder.op in ("placeholder", "get_attr") for key in writes.of(operand) for holder in writes.holders[key])
    if not any(kept):
        return None
    before = [writer for writer in writes.writers(operand) if order[writer] < order[node]]
    return before[-1] if before else None


def _write(node: fx.Node) -> _Write | None:
    """Match a write of all sequences and heads at some positions of dimension 2."""
    args: Any = node.args
    if node.target in ("index_copy_", torch.ops.aten.index_copy_.default) and len(args) == 4 and not node.kwargs:
        cache, dim, positions, new = args
        return _Write(node, cache, positions, new) if dim in (2, -2) else None
    if node.target is operator.setitem:
        cache, index, new = args
        whole = isinstance(index, tuple) and len(index) == 3 and index[:2] == (slice(None), slice(None))
        if whole and isinstance(index[2], fx.Node) and isinstance(new, fx.Node):
            rows, sizes = view.shape(index[2]), view.shape(new)
            alike = view.dtype(index[2]) == torch.int64 and view.dtype(new) == view.dtype(cache)
            if rows is not None and len(rows) == 1 and alike and sizes is not None and len(sizes) == 4:
                return _Write(node, cache, index[2], new) if same_sizes(sizes[2:3], rows) else None
    return None


def run(context: PassContext) -> PassResult:
    """Let every attention write its cache, the first of those that read one."""
    found: list[Site] = []
    misses: list[NearMiss] = []
    written: set[fx.Node] = set()
    for node in context.graph.nodes:
        item = find(context, node)
        if isinstance(item, NearMiss):
            misses.append(item)
        elif item is not None and written.isdisjoint(item.interior):
            written.update(item.interior)
            found.append(item)
    return apply_sites(context, found, misses)


FUSE_ATTENTION_CACHE = Pass(
    name="fuse_attention_cache",
    does="Let every attention write its cache, the first of those that read one.",
    run=run,
    after=("lift_attention",),
)
