"""Fuse an all-reduce with the norm of its sum: `core::all_reduce_rms_norm` and relatives, up to quantisation to fp4.

The search starts at each all-reduce and takes the longest chain after it that an op covers. Only the norm may read the
sum, else the tensor would be reduced twice. If others than a quantisation read the norm's result, the op ends at the
norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from core.common.ops.canonical import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE,
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4,
    ALL_REDUCE_RMS_NORM,
    QUANTIZE,
    QUANTIZE_FP4,
    RMS_NORM,
)
from core.common.passes import (
    CanonicalOp,
    Guards,
    NearMiss,
    Pass,
    PassContext,
    PassTraits,
    Site,
    calls,
    find_op,
    near_miss,
    view,
)
from core.common.passes.collective.limits import call_of, refused_bytes, refused_group
from core.common.passes.quantize.chain import read_quantize

_FUSED: Mapping[str, CanonicalOp] = MappingProxyType(
    {
        RMS_NORM.name: ALL_REDUCE_RMS_NORM,
        ADD_RMS_NORM.name: ALL_REDUCE_ADD_RMS_NORM,
        ADD_RMS_NORM_QUANTIZE.name: ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    }
)
"""Name of the op after an all-reduce -> the op that does both."""
_OPTIONS = frozenset({"dtype", "granularity", "group_size"})
"""The arguments of a quantisation that the fused op takes, besides the scale."""


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return an all-reduce with the norm of its sum, and the quantisation of that."""
    reduced = call_of(node, ALL_REDUCE)
    if reduced is None:
        return None
    x, group = reduced["x"], str(reduced["group"])
    norm = view.only_user(node)
    if norm is None:
        return near_miss(node, f"{node} is read by {', '.join(user.name for user in node.users) or 'nothing'}")
    op = find_op(norm.target)
    given = calls.arguments(norm, op) if op is not None and op.name in _FUSED else {}
    if op is None or node not in (given.get("x"), given.get("residual")):
        return near_miss(node, f"{norm}, which alone reads {node}, is no norm of it")
    reason = refused_group(context, group) or refused_bytes(context, group, x)
    if reason:
        return near_miss(node, reason)
    if "residual" in given:
        residual = given["x"] if given["residual"] is node else given["residual"]
        if residual is node:
            return near_miss(node, f"{norm} adds {node} to itself")
        if view.dtype(residual) != view.dtype(node) or not view.same_shape(residual, node):
            return near_miss(node, f"{residual} and {node} differ in shape or dtype")
        given["residual"] = residual
    given |= {"x": x, "group": group}
    return _quantized(node, norm, given) if op is ADD_RMS_NORM else _site(_FUSED[op.name], given, (node, norm))


def _quantized(node: fx.Node, norm: fx.Node, given: dict[str, Any]) -> Site | None:
    """Return the site of a norm, with the quantisation if that alone reads the norm's result."""
    normed, total = calls.outputs(norm)
    last = view.only_user(normed) if normed is not None else None
    op = find_op(last.target) if last is not None else None
    interior = (node, norm, *filter(None, (normed,)))
    if last is not None and op is QUANTIZE:
        quantize = read_quantize(last)
        if quantize is not None and quantize.x is normed and quantize.options.keys() <= _OPTIONS:
            given |= {"scale": quantize.scale, **quantize.options}
            return _site(ALL_REDUCE_ADD_RMS_NORM_QUANTIZE, given, (*interior, last), further=(total,))
    if last is not None and op is QUANTIZE_FP4:
        given["scale"] = calls.arguments(last, QUANTIZE_FP4).get("scale")
        return _site(ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4, given, (*interior, last), further=(total,))
    return _site(ALL_REDUCE_ADD_RMS_NORM, given, (node, norm))


def _site(
    fused: CanonicalOp,
    given: dict[str, Any],
    interior: tuple[fx.Node, ...],
    *,
    further: tuple[fx.Node | None, ...] = (),
) -> Site | None:
    """Return the site of an op whose results are those of the last node of its interior, and further ones."""
    return calls.site(fused, given, interior, (*calls.outputs(interior[-1]), *further))


FUSE_ALL_REDUCE_NORM = Pass(
    name="fuse_all_reduce_norm",
    find=find,
    does="Fuse every all-reduce with the norm of its sum.",
    after=(
        *("lift_collectives", "lift_rms_norm", "fuse_add_rms_norm", "eliminate_common_subexpressions"),
        *("share_quantize_scales", "fuse_rms_norm_quantize", "fuse_add_rms_norm_quantize", "sequence_parallel"),
    ),
    guards=Guards(world_size=(2, None)),
    # Kernels that exchange in one step send all to all, which pays less the more processes there are. An implementation
    # states its own limits in its condition: nodes that it refuses are put back.
    params=MappingProxyType(
        {
            "most_bytes_of_2": 64 << 20,
            "most_bytes_of_4": 32 << 20,
            "most_bytes_of_8": 8 << 20,
        }
    ),
    traits=PassTraits(reads_content=False),
)
