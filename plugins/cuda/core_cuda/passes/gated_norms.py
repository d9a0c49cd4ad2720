"""Fuse an RMSNorm and the gate before or behind it, with the casts and the weight between them, to one launch.

Layers of Mamba 2 norm what they have gated, in groups of columns, and multiply by the weight in half precision; layers
of the gated delta rule norm each head and gate the result. Both gate in fp32. Kernel by kernel that is up to six
launches, and most of them move twice the bytes that the model holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.ops.canonical import GATED_ACTIVATION, RMS_NORM
from core.common.passes import (
    LIFTS,
    NearMiss,
    Pass,
    PassContext,
    Site,
    find_op,
    near_miss,
    same_sizes,
    value_of,
    view,
)
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.norm.gated_norm import gated_norm, why_not
from core_cuda.passes.examples.dense import gated_norms
from core_cuda.passes.taking import given

_SHAPES = frozenset({"view", "reshape", "unflatten", "flatten"})


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a norm of what is gated, or the gate of what is normed; a near-miss where one kernel can't do it."""
    if find_op(node.target) is RMS_NORM:
        return _gate_first(node)
    return _norm_first(node) if find_op(node.target) is GATED_ACTIVATION else None


@dataclass(slots=True)
class _Match:
    """What the kernel computes. end: where it ends. links: nodes, each with the one node that may use it."""

    norm: fx.Node
    gated: fx.Node
    x: fx.Node
    end: fx.Node
    links: dict[fx.Node, fx.Node]
    weight: Any
    normed_dtype: torch.dtype | None
    #: as `core::rms_norm` has them, where the weight is the norm's own
    offset: float
    weight_dtype: torch.dtype | None
    groups: int = 1


def _gate_first(norm: fx.Node) -> Site | NearMiss | None:
    call = given(norm)
    source = call["x"]
    gated = source.args[0] if view.kind(source) in _SHAPES else source
    if not isinstance(gated, fx.Node) or find_op(gated.target) is not GATED_ACTIVATION:
        return None
    groups = _groups(gated, source)
    if groups is None:
        return near_miss(norm, f"{source} does not cut the columns of {gated} into groups")
    links = {gated: norm} if source is gated else {gated: source, source: norm}
    match = _Match(norm, gated, given(gated)["up"], norm, links, *_weight_of(norm), groups)
    _read_on(match)
    if not view.same_shape(match.end, gated):
        return near_miss(norm, f"{match.end} leaves the groups of {gated} apart")
    return _site(match, norm_first=False)


def _weight_of(norm: fx.Node) -> tuple[Any, torch.dtype | None, float, torch.dtype | None]:
    """Return a norm's weight, what its rows are rounded to before that, its offset, and what the weight is cast to."""
    call = given(norm)
    if call["weight"] is None:
        return None, view.dtype(norm), 0.0, None
    return call["weight"], call["normed_dtype"], call["offset"], call["weight_dtype"]


def _read_on(match: _Match) -> None:
    """Follow the norm to the shape of what was gated, to a cast and to a weight, as far as it goes."""
    after = view.only_user(match.end)
    if after is not None and view.kind(after) in _SHAPES and view.same_shape(after, match.gated):
        match.end, after = after, view.only_user(after)
    if match.weight is not None:
        return
    rounds = after is not None and view.dtype(match.end) == torch.float32 and view.dtype(after) in DTYPES
    if after is not None and rounds and view.source_of_cast(after) is match.end:
        match.end, match.normed_dtype, after = after, view.dtype(after), view.only_user(after)
    weight = view.other(after, match.end) if after is not None and view.kind(after) == "mul" else None
    columns = view.shape(match.gated)
    if after is not None and isinstance(weight, fx.Node) and columns and view.shape(weight) == (columns[-1],):
        match.end, match.weight = after, weight


def _norm_first(gated: fx.Node) -> Site | NearMiss | None:
    wide = given(gated)["up"]
    norm = view.without_exact_casts(wide)[0] if isinstance(wide, fx.Node) else None
    if norm is None or find_op(norm.target) is not RMS_NORM:
        return None
    links = {norm: gated} if wide is norm else {norm: wide, wide: gated}
    match = _Match(norm, gated, given(norm)["x"], gated, links, *_weight_of(norm))
    narrow = view.only_user(gated)
    if narrow is not None and view.source_of_cast(narrow) is gated and view.dtype(narrow) in DTYPES:
        match.end = narrow
    return _site(match, norm_first=True)


def _groups(whole: fx.Node, parts: fx.Node) -> int | None:
    """Return into how many groups of columns a node cuts the rows of another, 1 if it is the other; None if it does
    otherwise."""
    if view.same_shape(whole, parts):
        return 1
    before, after = view.shape(whole) or (), view.shape(parts) or ()
    width, (groups, size) = before[-1:], after[-2:] if len(after) > 1 else (0, 0)
    is_cut = all(type(each) is int for each in (*width, groups, size)) and width == (groups * size,)
    return groups if is_cut and same_sizes(before[:-1], after[:-2]) else None


def _site(match: _Match, *, norm_first: bool) -> Site | NearMiss:
    norm, gated = match.norm, match.gated
    norming, gating = given(norm), given(gated)
    for each, after in match.links.items():
        if list(each.users) != [after]:
            return near_miss(norm, f"{each} is used otherwise than in {after}")
    if gating["limit"] or gating["up_offset"]:
        return near_miss(norm, f"{gated} bounds or shifts what it multiplies")
    if norming["weight"] is None and norming["normed_dtype"] not in (None, torch.float32, view.dtype(norm)):
        return near_miss(norm, f"{norm} rounds twice")
    wide = (view.dtype(gated), view.dtype(gating["gate"]), norming["compute_dtype"] or torch.float32)
    if wide != (torch.float32,) * 3 or view.dtype(norming["x"]) not in DTYPES:
        found = ", ".join(map(str, wide))
        return near_miss(norm, f"{gated}, its gate and the norm compute in {found}, and the kernel in torch.float32")
    x, gate = (view.without_exact_casts(each)[0] for each in (match.x, gating["gate"]))
    rounding = {
        "normed_dtype": match.normed_dtype,
        "weight_dtype": match.weight_dtype,
        "middle_dtype": view.dtype(norm if norm_first else match.end),
        "out_dtype": view.dtype(match.end),
    }
    weight = value_of(match.weight) if isinstance(match.weight, fx.Node) else None
    if reason := why_not(value_of(x), value_of(gate), weight, match.groups, *rounding.values()):
        return near_miss(norm, reason)
    return Site(
        anchor=match.end,
        target=gated_norm,
        args=(x, gate, match.weight, norming["eps"]),
        kwargs={
            "kind": gating["kind"],
            "norm_first": norm_first,
            "groups": match.groups,
            "offset": match.offset,
            **rounding,
        },
        interior=view.between(match.end, x, gate, match.weight),
    )


FUSE_GATED_NORM = Pass(
    name="fuse_gated_norm",
    does="Fuse every RMSNorm and the gate before or behind it.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", "fuse_add_rms_norm", *LIFTS),
    examples=gated_norms,
)
