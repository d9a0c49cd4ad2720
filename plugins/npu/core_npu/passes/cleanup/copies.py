"""Erase copies into buffers that the graph itself makes; readers of the copy then read the source.

Models for the device copy a residual into a buffer that a fused op reads. Where the graph itself makes the buffer, and
nothing writes into either later, nobody can tell the two apart. A buffer that the caller sees keeps its copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, fx, nn

from core.common.passes import (
    LIFTS,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    Writes,
    near_miss,
    site_name,
    value_of,
)
from core.common.passes.values.layouts import same_layout
from core_npu.passes.conditions import first_reason, same_tensors
from core_npu.passes.streams import streams

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.copy_)


def run(context: PassContext) -> PassResult:
    """Erase every copy that nobody can tell from its source."""
    sites: list[str] = []
    misses: list[NearMiss] = []
    for node in list(context.graph.nodes):
        if not _copies(node):
            continue
        reason = _refusal(context, node)
        if reason:
            misses.append(near_miss(node, reason))
            continue
        sites.append(site_name(node))
        _erase(context, node)
    return PassResult(matched=len(sites), sites=tuple(sites), near_misses=tuple(misses))


def _copies(node: fx.Node) -> bool:
    written = node.op == "call_method" and node.target == "copy_"
    calls = node.op == "call_function" and node.target in _COPIES
    return (written or calls) and len(node.args) >= 2 and all(isinstance(arg, fx.Node) for arg in node.args[:2])


def _refusal(context: PassContext, node: fx.Node) -> str:
    into, source = node.args[:2]
    assert isinstance(into, fx.Node) and isinstance(source, fx.Node)
    return first_reason(
        same_tensors(context, into, source),
        "" if same_layout(value_of(into), value_of(source)) else f"{into} and {source} lie otherwise in memory",
        _seen(context, node, into),
        _written(context, node, into, source),
        _elsewhere(node, into),
    )


def _seen(context: PassContext, node: fx.Node, into: fx.Node) -> str:
    """Return what distinguishes the buffer from its source, or ""."""
    order, writes = context.analysis("order"), context.analysis("writes")
    if not _makes_memory(into):
        return f"{into} is no memory that the graph itself has made whole"
    for key in writes.of(into):
        for holder in writes.holders[key]:
            if holder.op in ("placeholder", "get_attr"):
                return f"the caller sees {holder}"
            early = next((user for user in holder.users if order[user] < order[node]), None)
            if early is not None:
                return f"{early} reads {holder} before the copy"
            if any(user.op == "output" for user in holder.users):
                return f"{holder} is returned"
    return ""


def _makes_memory(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
    return name.partition(".")[0] in ("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros")


def _written(context: PassContext, node: fx.Node, into: fx.Node, source: fx.Node) -> str:
    """Return what else writes into the buffer, or later into its source, or ""."""
    order: dict[fx.Node, int] = context.analysis("order")
    writes: Writes = context.analysis("writes")
    other = next((writer for writer in writes.writers(into) if writer is not node), None)
    if other is not None:
        return f"{other} writes into {into} too"
    later = next((writer for writer in writes.writers(source) if order[writer] > order[node]), None)
    return f"{later} writes into {source} later" if later is not None else ""


def _elsewhere(node: fx.Node, into: fx.Node) -> str:
    """Return the readers of the copy that run in another stream, or ""."""
    known = streams(node.graph)
    readers = (*into.users, *node.users)
    far = next((user for user in readers if known.get(user) != known.get(node)), None)
    return f"{far} runs in another stream or scope" if far is not None else ""


def _erase(context: PassContext, node: fx.Node) -> None:
    into, source = node.args[:2]
    assert isinstance(into, fx.Node) and isinstance(source, fx.Node)
    node.replace_all_uses_with(source)
    context.graph.erase_node(node)
    into.replace_all_uses_with(source)
    context.graph.erase_node(into)
    if context.analyses is not None:
        context.analyses.invalidate()


class _Buffered(nn.Module):
    """A residual that is copied into a buffer before a norm of its sum reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.4, 1.7, 64))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.empty_like(residual)
        buffer.copy_(residual.sin())
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, buffer, self.gamma, 1e-5)
        return y, total


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the copied residual."""
    rows = partial(torch.randn, 5, 64, generator=torch.Generator().manual_seed(6))
    yield _Buffered(), (rows(), rows())


ERASE_COPIES = Pass(
    name="erase_npu_copies",
    does="Erase every copy that nobody can tell from its source.",
    run=run,
    after=LIFTS,
    before=("fuse_npu_add_rms_norm",),
    examples=examples,
    owner="npu",
)
