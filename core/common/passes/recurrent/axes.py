"""What a node holds, seen through views that only move, add, drop or repeat dimensions, and through casts.

Models spell one broadcast in many ways: `unsqueeze`, an index with None, a transposition, `expand`. Behind all of them
stands the node that was computed, and for each dimension seen the dimension of that node which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from core.common.passes import Index, Refused, Viewed, same_size, same_sizes, view

Axis = int | None
_WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class Seen:
    """A node, and for each dimension that is seen the dimension of the node; None for one that is new, or repeated.

    sizes: of the dimensions that are seen.
    """

    node: fx.Node
    axes: tuple[Axis, ...]
    sizes: tuple[Any, ...] = field(compare=False)

    def of(self, *dims: int) -> Seen:
        """Return these dimensions of what is seen, in this order."""
        return Seen(self.node, tuple(self.axes[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def repeats(self, *dims: int) -> bool:
        """Tell whether along each of these dimensions all is the same."""
        return all(self.axes[dim] is None or same_size(self.sizes[dim], 1) for dim in dims)

    def behind(self, source: Any, *, exact: bool = True) -> Seen | None:
        """Return what the same dimensions show of a source from which the node is computed number by number."""
        inner = seen(source, exact=exact)
        if inner is None or len(inner.axes) != len(view.shape(self.node) or ()):
            return None
        return Seen(inner.node, tuple(None if axis is None else inner.axes[axis] for axis in self.axes), self.sizes)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The node's own sizes along the dimensions seen; 1 for those that it does not have."""
        sizes = view.shape(self.node) or ()
        return tuple(1 if axis is None else sizes[axis] for axis in self.axes)

    def as_input(self, what: str, wanted: Sequence[Any]) -> fx.Node | Viewed:
        """Return the node as an op takes it, with exactly the dimensions seen; raise `Refused` where it has others, or
        other sizes than are wanted."""
        sizes = view.shape(self.node) or ()
        if not same_sizes(self.shape, wanted):
            raise Refused(self.node, f"{what} {self.node} has the sizes {self.shape}, not {tuple(wanted)}")
        kept = [axis for axis in self.axes if axis is not None]
        missing = (dim for dim in range(len(sizes)) if dim not in kept and not same_size(sizes[dim], 1))
        added = (size for axis, size in zip(self.axes, self.sizes, strict=True) if axis is None)
        if kept != sorted(set(kept)) or [*missing] or not all(same_size(size, 1) for size in added):
            raise Refused(self.node, f"{what} {self.node} has the shape {sizes}, and is read along {self.axes}")
        index: list[Any] = []
        dim = 0
        for axis in (*self.axes, len(sizes)):
            if axis is not None:
                index += [0] * (axis - dim) + [_WHOLE]
                dim = axis + 1
            elif dim < len(sizes) and dim not in kept:
                index.append(_WHOLE)  # of size 1, as a new dimension would be
                dim += 1
            else:
                index.append(None)
        index.pop()
        plain = all(item == _WHOLE for item in index)
        return self.node if plain else Viewed(self.node, (Index(tuple(index)),))


def seen(node: Any, *, exact: bool = True, ends: Sequence[fx.Node] = ()) -> Seen | None:
    """Return what a node shows; None for what is no tensor.

    exact: look through casts that keep every value only, else through all between floating dtypes. ends: nodes behind
    which not to look.
    """
    sizes = view.shape(node)
    if sizes is None:
        return None
    axes: tuple[Axis, ...] = tuple(range(len(sizes)))
    while node not in ends:
        source = _before_cast(node, exact)
        if source is None:
            step = _STEPS[view.kind(node)](node) if view.kind(node) in _STEPS else None
            if step is None:
                break
            source, moved = step
            axes = tuple(None if axis is None else moved[axis] for axis in axes)
        node = source
    return Seen(node, axes, sizes)


def _before_cast(node: fx.Node, exact: bool) -> fx.Node | None:
    source = view.source_of_cast(node)
    before, after = view.dtype(source), view.dtype(node)
    if source is None or before is None or after is None:
        return None
    floating = before.is_floating_point and after.is_floating_point
    return source if view.is_exact(before, after) or (floating and not exact) else None


Step = tuple[fx.Node, tuple[Axis, ...]]
"""The input of a view, and for each dimension of the view the input's."""


def _same(node: fx.Node) -> Step | None:
    return node.args[0], tuple(range(len(view.shape(node) or ())))  # type: ignore[return-value]  # a tensor's node


def _unsqueeze(node: fx.Node) -> Step | None:
    rank, dim = len(view.shape(node) or ()), view.operand(node, 1, "dim")
    return _source(node, [axis if axis < dim % rank else axis - 1 for axis in range(rank)], {dim % rank})


def _squeeze(node: fx.Node) -> Step | None:
    source, dim = node.args[0], view.operand(node, 1, "dim")
    rank = len(view.shape(source) or ())
    if type(dim) is not int or len(view.shape(node) or ()) != rank - 1:
        return None
    return _source(node, [axis for axis in range(rank) if axis != dim % rank])


def _transpose(node: fx.Node) -> Step | None:
    swapped, order = view.swapped_dims(node), list(range(len(view.shape(node) or ())))
    if swapped is None:
        return None
    first, second = swapped
    order[first], order[second] = second, first
    return _source(node, order)


def _permute(node: fx.Node) -> Step | None:
    dims: Any = node.args[1:] if len(node.args) > 2 else view.operand(node, 1, "dims")
    return _source(node, [dim % len(dims) for dim in dims]) if isinstance(dims, (tuple, list)) else None


def _expand(node: fx.Node) -> Step | None:
    """Read an expansion: dimensions that it repeats, or adds in front, are of no dimension of its input."""
    before, after = view.shape(node.args[0]) or (), view.shape(node) or ()
    added = len(after) - len(before)
    new = {dim for dim in range(len(after)) if dim < added or not same_size(before[dim - added], after[dim])}
    return _source(node, [dim - added for dim in range(len(after))], new)


def _getitem(node: fx.Node) -> Step | None:
    """Read an index of whole slices, None, and 0 for dimensions of size 1."""
    source, index = node.args[0], node.args[1]
    sizes = view.shape(source)
    if sizes is None:
        return None
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        place = items.index(Ellipsis)
        used = sum(item is not None for item in items) - 1
        items[place : place + 1] = [_WHOLE] * (len(sizes) - used)
    order: list[int] = []
    new: set[int] = set()
    dim = 0
    for item in items:
        if item is None:
            new.add(len(order))
            order.append(-1)
            continue
        if not (isinstance(item, slice) and item == _WHOLE):
            if type(item) is not int or not same_size(sizes[dim], 1):
                return None
        else:
            order.append(dim)
        dim += 1
    return _source(node, [*order, *range(dim, len(sizes))], new)


def _reshape(node: fx.Node) -> Step | None:
    """Read a reshape that only adds and drops dimensions of size 1."""
    before, after = view.shape(node.args[0]) or (), view.shape(node) or ()
    left = [dim for dim, size in enumerate(before) if not same_size(size, 1)]
    right = [dim for dim, size in enumerate(after) if not same_size(size, 1)]
    if not same_sizes([before[dim] for dim in left], [after[dim] for dim in right]):
        return None
    if len(before) == len(after) and same_sizes(before, after):
        return _same(node)
    known = dict(zip(right, left, strict=True))
    # A dimension of size 1 is any other: which of the input's it is matters to nobody.
    return _source(node, [known.get(dim, -1) for dim in range(len(after))], set(range(len(after))) - known.keys())


def _source(node: fx.Node, order: Sequence[int], new: set[int] = frozenset()) -> Step | None:  # type: ignore[assignment]
    source = node.args[0]
    if not isinstance(source, fx.Node) or view.shape(source) is None:
        return None
    return source, tuple(None if dim in new else axis for dim, axis in enumerate(order))


_STEPS = {
    **dict.fromkeys(("contiguous", "clone"), _same),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("reshape", "view"), _reshape),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "permute": _permute,
    "expand": _expand,
    "getitem": _getitem,
}
