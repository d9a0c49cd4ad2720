"""Fuse a linear layer and the sum of its results over the processes to `npu_mm_all_reduce_base`.

The kernel sends parts of the product while it computes others. torch_npu's documentation asks for it in prefill and not
in decode; vllm-ascend fused the same pair from 512 tokens on. The norm after the sum then adds by `npu_add_rms_norm`,
as in vllm-ascend; without this pass the sum, the add and the norm are one op (`fuse_all_reduce_norm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

from torch import fx

from core.common.ops.canonical import ALL_REDUCE, LINEAR
from core.common.passes import Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss, view
from core.common.passes.collective.limits import call_of
from core.common.passes.linear.lift import linear_operands
from core_npu.ops import collective
from core_npu.passes.conditions import HALVES, first_reason
from core_npu.passes.streams import streams

_MAX_RANK = 8


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the linear layer and the sum at a node."""
    given = call_of(node, ALL_REDUCE)
    if given is None:
        return None
    linear, group = given["x"], str(given["group"])
    if not isinstance(linear, fx.Node) or not (view.kind(linear) == "linear" or linear.target is LINEAR.overload):
        return near_miss(node, f"{linear}, which is summed, is no linear layer's")
    x, weight, bias = linear_operands(linear)
    reason = first_reason(
        "" if view.only_user(linear) is node else f"{linear} is read by others too",
        collective.why_not_npus(group),
        _refused_operands(x, weight, bias),
        _refused_tokens(context, node),
    )
    if reason:
        return near_miss(node, reason)
    return Site(
        anchor=node, target=collective.linear_all_reduce, args=(x, weight, bias, group), interior=(linear, node)
    )


def _refused_operands(x: Any, weight: Any, bias: Any) -> str:
    dtype, shape = view.dtype(x), view.shape(x) or ()
    if dtype not in HALVES:
        return f"{x} is {dtype}, the kernel takes {' and '.join(sorted(map(str, HALVES)))}"
    for operand in (weight, bias):
        if operand is not None and view.dtype(operand) != dtype:
            return f"{x} is {dtype}, {operand} {view.dtype(operand)}"
    if not 2 <= len(shape) <= _MAX_RANK or len(view.shape(weight) or ()) != 2:
        return f"{x} has {len(shape)} dimensions, {weight} {len(view.shape(weight) or ())}"
    return ""


def _refused_tokens(context: PassContext, total: fx.Node) -> str:
    """Return why a bucket that the graph serves has too few tokens, or ""."""
    counts = context.served(prod((view.shape(total) or ())[:-1]))
    least = int(context.params["least_tokens"])
    if counts is None:
        return f"how many tokens {total} has is unknown"
    return f"{total} has {min(counts)} tokens, the pass is for {least} at least" if min(counts) < least else ""


def _large(context: PassContext) -> list[frozenset[str]]:
    """Return, for each bucket, the sums of enough tokens."""
    sums = [node for node in context.graph.nodes if call_of(node, ALL_REDUCE)]

    def taken(sizes: Mapping[Any, int]) -> frozenset[str]:
        alone = replace(context, sizes=(sizes,))
        return frozenset(node.name for node in sums if not _refused_tokens(alone, node))

    return [taken(sizes) for sizes in context.sizes]


FUSE_LINEAR_ALL_REDUCE = Pass(
    name="fuse_npu_linear_all_reduce",
    find=find,
    does="Fuse every such pair.",
    after=("lift_collectives", "sequence_parallel", "merge_linears", "eliminate_common_subexpressions"),
    before=("fuse_all_reduce_norm",),
    guards=Guards(world_size=(2, None), scopes=streams),
    params=MappingProxyType({"least_tokens": 512}),
    owner="npu",
    traits=PassTraits(reads_content=False, tells_apart=_large),
)
