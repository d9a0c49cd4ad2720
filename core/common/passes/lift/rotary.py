"""Lift rotary embedding of query and key, `x * cos + rotate_half(x) * sin`, to `core::rotary`.

Query and key are two rotations by the same tables; they become one op. A partial rotation (of a slice of the head, put
together again with the rest) is lifted at the slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.rotary import ROTARY
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.rewrite import Site, fuse, near_miss


@dataclass(frozen=True, slots=True)
class _Rotation:
    """One rotated tensor: x turned by cos and sin, and the nodes that compute it, the result last."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    nodes: tuple[fx.Node, ...]


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the rotations of query and key when asked about the earlier of the two results."""
    first = _rotation(node)
    if first is None:
        return None
    order = context.analysis("order")
    partners = [r for r in _rotations_by(first.cos) if r.sin is first.sin and r.x is not first.x]
    if len(partners) != 1:
        return near_miss(node, f"{len(partners)} other tensors are rotated by {first.cos} and {first.sin}, not one")
    second = partners[0]
    if order[second.nodes[-1]] < order[node]:
        return None  # told when asked about the partner
    return Site(
        anchor=node,
        target=ROTARY.overload,
        args=(first.x, second.x, first.cos, first.sin),
        interior=(*first.nodes, *second.nodes),
        outputs=(node, second.nodes[-1]),
    )


def _rotations_by(cos: fx.Node) -> list[_Rotation]:
    """Return all rotations that use this table as their cosine."""
    sums = dict.fromkeys(user for product in cos.users for user in product.users)
    found = (_rotation(node) for node in sums)
    return [rotation for rotation in found if rotation is not None and rotation.cos is cos]


def _rotation(node: fx.Node) -> _Rotation | None:
    if view.kind(node) != "add":
        return None
    for straight, turned in view.orders(node):
        if view.kind(straight) == view.kind(turned) == "mul":
            found = _read(node, straight, turned)
            if found is not None:
                return found
    return None


def _read(node: fx.Node, straight: fx.Node, turned: fx.Node) -> _Rotation | None:
    for rotated, sin in view.orders(turned):
        half = _rotated_half(rotated)
        if half is None or not isinstance(sin, fx.Node):
            continue
        x, parts = half
        cos = view.other(straight, x)
        if isinstance(cos, fx.Node) and view.dtype(node) == view.dtype(x):
            return _Rotation(x, cos, sin, (*parts, rotated, straight, turned, node))
    return None


def _rotated_half(node: object) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Return (x, nodes) if the node is `cat((-x[..., half:], x[..., :half]), -1)`."""
    if view.kind(node) != "cat" or not isinstance(node, fx.Node):
        return None
    parts: Any = node.args[0]
    rank = len(view.shape(node) or ())
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or view.operand(node, 1, "dim", 0) not in (-1, rank - 1):
        return None
    negated, first = parts
    second = negated.args[0] if view.kind(negated) == "neg" and isinstance(negated, fx.Node) else None
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    x = first.args[0]
    if not isinstance(x, fx.Node) or second.args[0] is not x:
        return None
    size = (view.shape(x) or (None,))[-1]
    if not isinstance(size, int) or _slice(first) != (0, size // 2) or _slice(second) != (size // 2, size):
        return None
    return x, (first, second, negated)


def _slice(node: fx.Node) -> tuple[int, int] | None:
    """Return (start, stop) if the node takes `[..., start:stop]` of its input."""
    if view.kind(node) != "getitem":
        return None
    size = (view.shape(node.args[0]) or (None,))[-1]
    index: Any = node.args[1]
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return None
    start, stop, step = index[1].start or 0, index[1].stop, index[1].step
    if step not in (None, 1) or not isinstance(size, int):
        return None
    return (start, size if stop is None else stop) if isinstance(start, int) else None


def run(context: PassContext) -> PassResult:
    """Lift every rotation of a query and a key."""
    return fuse(context, find)


LIFT_ROTARY = Pass(name="lift_rotary", run=run)
