"""Lift RMSNorm, in every spelling and rounding that models write it, to `core::rms_norm`.

The matcher starts at the inverse root and reads in both directions: back to the input, on to weight and last cast. From
this it gets the op's arguments: eps, offset, and the dtype at each place where the model rounds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from core.common.ops.norm import RMS_NORM
from core.common.passes import NearMiss, Pass, PassContext, Site, near_miss, view


@dataclass(slots=True)
class _Norm:
    """The match so far; `end` computes the norm."""

    x: fx.Node
    eps: float
    compute_dtype: torch.dtype
    end: fx.Node
    weight: fx.Node | None = None
    offset: float = 0.0
    weight_dtype: torch.dtype | None = None
    normed_dtype: torch.dtype | None = None


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the RMSNorm around an inverse root, a near-miss if the root is not part of a norm, or None for other
    nodes."""
    kind = view.kind(node)
    if kind == "rms_norm":
        found: Site | NearMiss | None = _single(node)
    elif kind in ("div", "normalize"):
        found = _root(node, context.taken) or _divided(node)
    else:
        found = _root(node, context.taken) if kind in ("rsqrt", "pow", "reciprocal") else None
    if isinstance(found, Site):
        context.taken.add(found.anchor)  # a later norm looks up its input there
    return found


def _root(node: fx.Node, ends: Collection[fx.Node]) -> Site | NearMiss | None:
    shifted = view.inverse_root(node)
    if shifted is None:
        return None
    mean, eps = view.plus_number(shifted) or (shifted, 0.0)
    wide = view.square(view.last_dim_mean(mean))
    if wide is None:
        return _another_root(node, shifted)
    norm = _body(node, wide, eps, ends)
    if not isinstance(norm, _Norm):
        return norm
    _read_weight_and_casts(norm)
    return _site(norm)


def _body(root: fx.Node, wide: fx.Node, eps: float, ends: Collection[fx.Node]) -> _Norm | NearMiss | None:
    """Read input and product around the inverse root. wide: what was squared. ends: results of earlier norms."""
    if view.kind(wide) == "sub":
        return None  # the square belongs to a layer norm
    compute = view.dtype(wide)
    if compute is None:
        return near_miss(root, f"{wide} has no known dtype")
    x = view.before_casts(wide, ends)
    last = _without_idle_casts(root)
    user = view.only_user(last)
    if user is None or view.kind(user) != "mul":
        return near_miss(root, f"the inverse root {root} is used otherwise than in one product")
    scaled = view.other(user, last)
    if not isinstance(scaled, fx.Node) or view.before_casts(scaled, ends) is not x:
        return near_miss(root, f"{user} multiplies {scaled}, not the normalised {x}")
    if view.dtype(user) != compute or view.dtype(root) != compute:
        return near_miss(root, f"{user} is {view.dtype(user)}, its statistics are {compute}")
    return _Norm(x=x, eps=eps, compute_dtype=compute, end=user)


def _without_idle_casts(node: fx.Node) -> fx.Node:
    """Skip casts to the dtype that a node already has, each the only reader of the one before; return the last."""
    user = view.only_user(node)
    while user is not None and view.source_of_cast(user) is node and view.dtype(user) == view.dtype(node):
        node, user = user, view.only_user(user)
    return node


def _without_casts(node: fx.Node) -> fx.Node:
    while (source := view.source_of_cast(node)) is not None:
        node = source
    return node


def _another_root(root: fx.Node, shifted: fx.Node) -> NearMiss | None:
    """Say why the root of a mean square belongs to no norm; None for any other root."""
    mean: view.Operand = shifted
    while view.kind(mean) in ("add", "cast", "clamp", "clamp_min", "unsqueeze"):
        mean = next(iter(mean.all_input_nodes), None)
    if view.kind(mean) != "mean":
        return None
    source: fx.Node = mean.args[0]
    squared = view.square(_without_casts(source))
    if squared is None or view.kind(squared) == "sub":
        return None
    if view.last_dim_mean(mean) is None:
        return near_miss(root, f"{mean} is no mean over the last dimension alone, kept, in the dtype of {source}")
    if source is not _without_casts(source):
        return near_miss(root, f"{source} casts the squares before their mean is taken")
    return near_miss(root, f"{root} takes more of {mean} than the root of its sum with a number")


def _divided(node: fx.Node) -> NearMiss | None:
    """Say why a division by a root or a length is no RMSNorm: it rounds otherwise. None for other divisions."""
    if view.kind(node) == "normalize":
        scaled = any(view.kind(user) == "mul" for user in node.users)
        return near_miss(node, f"{node} divides by the length, which has a bound in place of eps") if scaled else None
    divisor = view.operand(node, 1, "other")
    while view.kind(divisor) in ("clamp_min", "expand_as"):
        divisor = divisor.args[0]
    if view.kind(divisor) in ("norm", "linalg_vector_norm"):
        source = divisor.args[0]
        scaled = view.is_number(node.args[0]) and any(source in user.all_input_nodes for user in node.users)
        if scaled or node.args[0] is source:
            return near_miss(node, f"{node} divides by the length of {source}, which has a bound in place of eps")
    if view.kind(divisor) == "sqrt":
        parts = view.plus_number(divisor.args[0])
        squared = view.square(view.last_dim_mean(parts[0])) if parts is not None else None
        if squared is not None and view.kind(squared) != "sub":
            return near_miss(node, f"{node} divides by the root, which rounds otherwise than its inverse")
    return None


def _read_weight_and_casts(norm: _Norm) -> None:
    """Go on from the normalised value: a cast, the weight, a cast; each only if nothing else uses what is before it."""
    following = view.only_user(norm.end)
    if following is not None and view.source_of_cast(following) is norm.end:
        weighted = view.only_user(following)
        if weighted is not None and _weight_of(weighted, following, norm):
            rounded = view.dtype(following)
            norm.normed_dtype = None if rounded == norm.compute_dtype else rounded
            norm.end = weighted
        else:
            norm.end = following
    elif following is not None and _weight_of(following, norm.end, norm):
        norm.end = following
    last = view.only_user(norm.end)
    if norm.weight is not None and last is not None and view.source_of_cast(last) is norm.end:
        before, after = view.dtype(norm.end), view.dtype(last)
        # A cast to a wider dtype belongs to the next node, not to the norm.
        if before == after or not view.is_exact(before, after):
            norm.end = last


def _weight_of(product: fx.Node, normed: fx.Node, norm: _Norm) -> bool:
    """Read the weight off `normed * weight`; False, and nothing read, if the other operand is no weight."""
    factor = view.other(product, normed) if view.kind(product) == "mul" else None
    if not isinstance(factor, fx.Node):
        return False
    factor, offset = view.plus_number(factor) or (factor, 0.0)
    wide = view.dtype(factor)
    source = view.source_of_cast(factor)
    weight = factor if source is None else source
    rows = view.shape(norm.x)
    if not rows or view.shape(weight) != (rows[-1],):
        return False
    norm.weight, norm.offset = weight, offset
    norm.weight_dtype = None if wide == view.dtype(weight) else wide
    return True


def _site(norm: _Norm) -> Site:
    return Site(
        anchor=norm.end,
        target=RMS_NORM.overload,
        args=(norm.x, norm.weight, norm.eps),
        kwargs={
            "offset": norm.offset,
            "compute_dtype": norm.compute_dtype,
            "normed_dtype": norm.normed_dtype,
            "weight_dtype": norm.weight_dtype,
            "out_dtype": view.dtype(norm.end),
        },
        interior=view.between(norm.end, norm.x, norm.weight),
    )


def _single(node: fx.Node) -> Site | NearMiss:
    """Lift `torch.rms_norm`, which rounds once at the end and takes a dtype's own eps when given none."""
    x, sizes = node.args[0], view.operand(node, 1, "normalized_shape")
    weight, eps = view.operand(node, 2, "weight"), view.operand(node, 3, "eps")
    if len(sizes) != 1:
        return near_miss(node, f"{node} normalises over {len(sizes)} dimensions")
    kind = view.dtype(x)
    if kind is None or not (eps is None or view.is_number(eps)):
        return near_miss(node, f"{node} has no known dtype or eps")
    return Site(
        anchor=node,
        target=RMS_NORM.overload,
        args=(x, weight, _default_eps(kind) if eps is None else float(eps)),
        kwargs={"out_dtype": view.dtype(node)},
        interior=(node,),
    )


@lru_cache
def _default_eps(dtype: torch.dtype) -> float:
    """Return the eps that `torch.rms_norm` takes when given none: that of the dtype, or of the one it computes in."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    own = torch.finfo(dtype).eps
    # Versions of torch differ for half precision; for this x the two possible results differ clearly.
    probe = torch.rms_norm(torch.full((1,), wide**0.5, dtype=dtype), (1,))
    return own if float(probe) < 0.5 else wide


LIFT_RMS_NORM = Pass(name="lift_rms_norm", find=find, does="Lift every RMSNorm of the graph.")
