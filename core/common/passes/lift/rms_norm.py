"""Lift RMSNorm, in every spelling and rounding that models write it, to `core::rms_norm`.

The matcher starts at the inverse root and reads in both directions: back to the input, on to weight and last cast. What
it reads off are the op's arguments: eps and offset as numbers, and the dtype at each place where the model rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from core.common.ops.normalization import RMS_NORM
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.rewrite import Site, fuse, near_miss


@dataclass(slots=True)
class _Norm:
    """What has been read so far: `end` computes the norm, `nodes` are all nodes that go into it."""

    x: fx.Node
    eps: float
    compute_dtype: torch.dtype
    end: fx.Node
    nodes: list[fx.Node]
    weight: fx.Node | None = None
    offset: float = 0.0
    weight_dtype: torch.dtype | None = None
    normed_dtype: torch.dtype | None = None
    extra: list[fx.Node] = field(default_factory=list)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the RMSNorm around an inverse root, a near-miss for one that is not a norm, or None for other nodes."""
    if view.kind(node) == "rms_norm":
        return _single(node)
    shifted = view.inverse_root(node)
    if shifted is None:
        return None
    parts = view.plus_number(shifted)
    squares = view.last_dim_mean(parts[0]) if parts is not None else None
    wide = view.square(squares)
    if parts is None or squares is None or wide is None:
        return None  # some other inverse root: a layer norm's, a learned scale's
    mean, eps = parts
    norm = _body(node, wide, eps)
    if isinstance(norm, _Norm):
        norm.nodes = [squares, mean, shifted, *_second_node(node, shifted), *norm.nodes]
    else:
        return norm
    _read_weight_and_casts(norm)
    return _site(norm)


def _body(root: fx.Node, wide: fx.Node, eps: float) -> _Norm | NearMiss:
    """Read input and product around the inverse root, where `wide` is what was squared."""
    compute = view.dtype(wide)
    if compute is None:
        return near_miss(root, f"{wide} has no known dtype")
    x, casts = view.without_exact_casts(wide)
    user = view.only_user(root)
    if user is None or view.kind(user) != "mul":
        return near_miss(root, f"the inverse root {root} is used otherwise than in one product")
    scaled = view.other(user, root)
    if not isinstance(scaled, fx.Node) or view.without_exact_casts(scaled)[0] is not x:
        return near_miss(root, f"{user} multiplies {scaled}, not the normalised {x}")
    if view.dtype(user) != compute:
        return near_miss(root, f"{user} is {view.dtype(user)}, its statistics are {compute}")
    own = view.without_exact_casts(scaled)[1]
    return _Norm(x=x, eps=eps, compute_dtype=compute, end=user, nodes=[*casts, *own, root, user])


def _second_node(root: fx.Node, shifted: fx.Node) -> list[fx.Node]:
    """Return the square root where the inverse root is spelled as two nodes."""
    return [arg for arg in root.args if isinstance(arg, fx.Node) and arg is not shifted]


def _read_weight_and_casts(norm: _Norm) -> None:
    """Go on from the normalised value: a cast, the weight, a cast; each only if nothing else uses what is before it."""
    following = view.only_user(norm.end)
    if following is not None and view.source_of_cast(following) is norm.end:
        weighted = view.only_user(following)
        if weighted is not None and _weight_of(weighted, following, norm):
            norm.normed_dtype = view.dtype(following)
            norm.nodes += [following, *norm.extra, weighted]
            norm.end = weighted
        else:
            norm.nodes.append(following)
            norm.end = following
    elif following is not None and _weight_of(following, norm.end, norm):
        norm.nodes += [*norm.extra, following]
        norm.end = following
    last = view.only_user(norm.end)
    if norm.weight is not None and last is not None and view.source_of_cast(last) is norm.end:
        norm.nodes.append(last)
        norm.end = last


def _weight_of(product: fx.Node, normed: fx.Node, norm: _Norm) -> bool:
    """Read the weight off `normed * weight`; False, and nothing read, if the other operand is no weight."""
    factor = view.other(product, normed) if view.kind(product) == "mul" else None
    if not isinstance(factor, fx.Node):
        return False
    nodes: list[fx.Node] = []
    offset = 0.0
    shifted = view.plus_number(factor)
    if shifted is not None:
        nodes.append(factor)
        factor, offset = shifted
    wide = view.dtype(factor)
    source = view.source_of_cast(factor)
    if source is not None:
        nodes.insert(0, factor)
        factor = source
    rows = view.shape(norm.x)
    if view.shape(factor) != (rows[-1] if rows else None,):
        return False
    norm.weight, norm.offset, norm.extra = factor, offset, nodes
    norm.weight_dtype = wide if source is not None else None
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
        interior=tuple(dict.fromkeys(norm.nodes)),
    )


def _single(node: fx.Node) -> Site | NearMiss:
    """Lift `torch.rms_norm`, which rounds once at the end and takes the dtype's own eps when given none."""
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
        args=(x, weight, torch.finfo(kind).eps if eps is None else eps),
        kwargs={"out_dtype": view.dtype(node)},
        interior=(node,),
    )


def run(context: PassContext) -> PassResult:
    """Lift every RMSNorm of the graph."""
    return fuse(context, find)


LIFT_RMS_NORM = Pass(name="lift_rms_norm", run=run)
