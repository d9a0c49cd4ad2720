"""Which two tensors are the halves of a third: gate and up of one projection, however a model takes them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.passes import same_sizes, value_of, view


@dataclass(frozen=True, slots=True)
class Halves:
    """The two halves of `whole`'s last dimension. first: the asked one comes first; interleaved: they alternate."""

    whole: fx.Node
    first: bool
    interleaved: bool


def halves(one: fx.Node, other: fx.Node) -> Halves | None:
    """Return the tensor whose halves the two nodes are, or None."""
    left, right = _part(one), _part(other)
    if left is None or right is None or left.whole is not right.whole:
        return None
    size = (view.shape(left.whole) or (None,))[-1]
    if not isinstance(size, int) or (left.count, right.count) != (size // 2, size // 2) or size % 2:
        return None
    starts, steps = (left.start, right.start), (left.step, right.step)
    for interleaved, second in ((False, size // 2), (True, 1)):
        if steps == ((2, 2) if interleaved else (1, 1)) and starts in ((0, second), (second, 0)):
            return Halves(left.whole, starts[0] == 0, interleaved)
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements start, start + step, … of whole's last dimension, `count` of them."""

    whole: fx.Node
    start: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """The part that a node takes of one dimension of its source; drops: whether that dimension is removed."""

    source: fx.Node
    dim: int
    start: Any
    step: Any
    drops: bool = False


def _part(node: fx.Node) -> _Part | None:
    taken = _taken(node)
    if taken is None or not isinstance(taken.start, int) or not isinstance(taken.step, int):
        return None
    sizes, made = view.shape(taken.source) or (), view.shape(node) or ()
    if not made or not isinstance(made[-1], int):
        return None
    if not taken.drops:
        last = taken.dim == len(sizes) - 1
        return _Part(taken.source, taken.start, taken.step, made[-1]) if last else None
    # The node is one of two rows or columns into which a view has split the last dimension.
    whole = taken.source.args[0] if view.kind(taken.source) in ("view", "reshape") else None
    if not isinstance(whole, fx.Node) or len(view.shape(whole) or ()) != len(sizes) - 1:
        return None
    lead = view.shape(whole) or ()
    if (lead[-1], sizes[taken.dim]) != (2 * made[-1], 2) or not same_sizes(lead[:-1], sizes[:-2]):
        return None
    if taken.dim == len(sizes) - 2:
        return _Part(whole, taken.start * made[-1], 1, made[-1])
    return _Part(whole, taken.start, 2, made[-1]) if taken.dim == len(sizes) - 1 else None


def _taken(node: fx.Node) -> _Taken | None:
    kind = view.kind(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if kind == "getitem" and view.kind(source) in ("chunk", "split", "split_with_sizes", "unbind"):
        return _of_parts(node, source)
    if kind == "getitem":
        return _of_index(source, node.args[1])
    if kind not in ("narrow", "slice", "select"):
        return None
    dim = _dim(source, view.operand(node, 1, "dim", 0))
    if dim is None:
        return None
    if kind == "slice":
        start, stop = view.operand(node, 2, "start"), view.operand(node, 3, "end")
        return _of_slice(source, dim, slice(start, stop, view.operand(node, 4, "step", 1)))
    start = view.operand(node, 2, "start" if kind == "narrow" else "index")
    return _of_slice(source, dim, slice(start, None)) if kind == "narrow" else _of_number(source, dim, start)


def _of_parts(node: fx.Node, parts: fx.Node) -> _Taken | None:
    """Match one result of `chunk`, `split` or `unbind`; the sizes of all results are known from their fake values."""
    source, index = parts.args[0], node.args[1]
    kind, members = view.kind(parts), value_of(parts)
    dim = _dim(source, view.operand(parts, 1 if kind == "unbind" else 2, "dim", 0))
    if not isinstance(source, fx.Node) or dim is None or not isinstance(index, int) or not members:
        return None
    index = index % len(members)
    if kind == "unbind":
        return _Taken(source, dim, index, 1, drops=True)
    return _Taken(source, dim, sum(member.shape[dim] for member in members[:index]), 1)


def _of_index(source: fx.Node, index: Any) -> _Taken | None:
    """Read `source[…]` that takes from one dimension and leaves the others whole."""
    if not view.shape(source):  # one of an op's several results, or of a number
        return None
    entries = list(index) if isinstance(index, tuple) else [index]
    rank = len(view.shape(source) or ())
    if any(entry is None or isinstance(entry, fx.Node) for entry in entries):
        return None
    missing = rank - sum(entry is not Ellipsis for entry in entries)
    place = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[place : place + 1] = [slice(None)] * missing
    cut = [dim for dim, entry in enumerate(entries) if entry != slice(None)]
    if len(cut) != 1:
        return None
    (dim,) = cut
    entry = entries[dim]
    return _of_slice(source, dim, entry) if isinstance(entry, slice) else _of_number(source, dim, entry)


def _of_slice(source: fx.Node, dim: int, part: slice) -> _Taken | None:
    size = (view.shape(source) or ())[dim]
    bounds = (part.start, part.stop, part.step)
    if not isinstance(size, int) or any(bound is not None and not isinstance(bound, int) for bound in bounds):
        return None
    start, _, step = part.indices(size)
    return _Taken(source, dim, start, step)


def _of_number(source: fx.Node, dim: int, index: Any) -> _Taken | None:
    size = (view.shape(source) or ())[dim]
    if not isinstance(index, int) or isinstance(index, bool) or not isinstance(size, int):
        return None
    return _Taken(source, dim, index % size, 1, drops=True)


def _dim(source: Any, dim: Any) -> int | None:
    rank = len(view.shape(source) or ())
    return dim % rank if isinstance(dim, int) and rank else None
