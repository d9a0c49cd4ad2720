"""Views between the layouts that models rotate in and the rows of tokens that attention takes: (T, H, D).

A layout names the dimensions of a query or key: b sequences, of which there is one, t tokens, h heads, d features.
Nothing here copies; the fake values of the views are made by hand.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.passes import describe, view
from core.common.passes.fresh import reread

Layout = tuple[str, ...]

LAYOUTS: Mapping[int, tuple[Layout, ...]] = MappingProxyType(
    {4: (("b", "h", "t", "d"), ("b", "t", "h", "d")), 3: (("h", "t", "d"), ("t", "h", "d"))}
)
"""Rank of a query or key -> what its dimensions may be."""
ROWS: Layout = ("t", "h", "d")


def follow(layout: Layout, views: Sequence[fx.Node]) -> Layout | None:
    """Return the layout after these views, one reading the other; None where it is none or more than layouts change."""
    for node in views:
        found = _after(layout, node)
        if found is None:
            return None
        layout = found
    return layout


def _after(layout: Layout, node: fx.Node) -> Layout | None:
    rank, kind = len(layout), view.kind(node)
    if kind == "transpose":
        dims = [view.operand(node, i, f"dim{i - 1}") for i in (1, 2)]
        if all(isinstance(dim, int) for dim in dims):
            order = list(layout)
            first, second = (dim % rank for dim in dims)
            order[first], order[second] = order[second], order[first]
            return tuple(order)
    dim: Any = None
    if kind == "getitem" and node.args[1] in (0, (0,)):
        dim = 0
    elif kind == "squeeze" or (kind == "select" and view.operand(node, 2, "index") == 0):
        dim = view.operand(node, 1, "dim")
    # Only the dimension of the one sequence may go.
    if isinstance(dim, int) and layout[dim % rank] == "b" and _size(node.args[0], dim) == 1:
        return tuple(name for name in layout if name != "b")
    return None


def _size(node: Any, dim: int) -> Any:
    sizes = view.shape(node)
    return None if sizes is None else sizes[dim]


def table_index(layout: Layout, table: fx.Node, x: fx.Node) -> tuple[Any, ...] | None:
    """Return what picks a row per token, (T, R), from a table of cos or sin; None where heads or sequences differ.

    layout: that of x, the query that the table is multiplied with. The index that puts the dimensions back has None for
    each 0.
    """
    sizes = view.shape(table)
    tokens = _size(x, layout.index("t"))
    if sizes is None or not 2 <= len(sizes) <= len(layout):
        return None
    index: list[Any] = []
    for name, size in zip(layout[-len(sizes) : -1], sizes, strict=False):
        if name == "t" and view.same_sizes((size,), (tokens,)):
            index.append(slice(None))
        elif name != "t" and type(size) is int and size == 1:
            index.append(0)
        else:
            return None
    if slice(None) not in index:
        return None
    while index and index[-1] == slice(None):
        index.pop()
    return tuple(index)


@dataclass(frozen=True, slots=True)
class _View:
    """A view to make: `index` it, or where that is None, swap two dimensions. value: the fake value that it gives."""

    value: Any
    index: tuple[Any, ...] | None = None
    swapped: tuple[int, int] = (0, 0)


class Views:
    """Makes views in front of a node, and what undoes them. made: all of them, in order."""

    def __init__(self, before: fx.Node) -> None:
        self._before = before
        self.made: list[fx.Node] = []

    def rows(self, x: fx.Node, layout: Layout) -> tuple[fx.Node, tuple[_View, ...]]:
        """Return a query or key of this layout as rows (T, H, D), and what `undo` needs to have it again."""
        first, second = layout.index("h"), layout.index("t")
        back: list[_View] = []
        if first < second:
            back.append(_View(view.value(x), swapped=(first, second)))
            source = _unswapped(x, first, second)
            if source is None:
                source = self._make(x, _View(_transposed(view.value(x), first, second), swapped=(first, second)))
            x = source
        if "b" in layout:
            back.append(_View(view.value(x), (None,)))
            x = self._make(x, _View(_picked(view.value(x), (0,)), (0,)))
        return x, tuple(reversed(back))

    def table(self, table: fx.Node, index: tuple[Any, ...]) -> tuple[fx.Node, tuple[_View, ...]]:
        """Return the rows (T, R) of a table that an index picks, and what `undo` needs to have the table again."""
        if not index:
            return table, ()
        back = _View(view.value(table), tuple(None if each == 0 else each for each in index))
        return self._make(table, _View(_picked(view.value(table), index), index)), (back,)

    def undo(self, x: fx.Node, back: tuple[_View, ...]) -> fx.Node:
        """Return what rows were made from."""
        for each in back:
            x = self._make(x, each)
        return x

    def _make(self, x: fx.Node, made: _View) -> fx.Node:
        graph, like = self._before.graph, self._before
        with graph.inserting_before(like):
            if made.index is None:
                node = graph.call_method("transpose", (x, *made.swapped))
            else:
                index = made.index if len(made.index) > 1 else made.index[0]
                node = graph.call_function(operator.getitem, (x, index))
        describe(node, like, made.value)
        self.made.append(node)
        return node


def _unswapped(x: fx.Node, first: int, second: int) -> fx.Node | None:
    """Return what a node transposes, where it swaps these two dimensions."""
    if view.kind(x) != "transpose" or not isinstance(x.args[0], fx.Node):
        return None
    dims = {view.operand(x, i, f"dim{i - 1}") for i in (1, 2)}
    rank = len(view.shape(x) or ())
    return x.args[0] if dims in ({first, second}, {first - rank, second - rank}) else None


def _transposed(value: FakeTensor, first: int, second: int) -> FakeTensor:
    dims = list(range(value.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return _reread(value, dims)


def _picked(value: FakeTensor, index: tuple[Any, ...]) -> FakeTensor:
    """Return a fake tensor indexed by 0 and whole slices."""
    return _reread(value, [dim for dim in range(value.ndim) if dim >= len(index) or index[dim] != 0])


def _reread(value: FakeTensor, dims: Sequence[int]) -> FakeTensor:
    shape, stride = value.shape, value.stride()
    return reread(value, [shape[dim] for dim in dims], [stride[dim] for dim in dims], value.storage_offset())
