"""Views between the layouts that models rotate in and the rows of tokens that attention takes: (T, H, D).

A layout names the dimensions of a query or key: b sequences, of which there is one, t tokens, h heads, d features.
Nothing here copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from core.common.passes import Index, Swap, Viewed, same_sizes, view

Layout = tuple[str, ...]

LAYOUTS: Mapping[int, tuple[Layout, ...]] = MappingProxyType(
    {4: (("b", "h", "t", "d"), ("b", "t", "h", "d")), 3: (("h", "t", "d"), ("t", "h", "d"))}
)
"""Rank of a query or key -> what its dimensions may be."""
ROWS: Layout = ("t", "h", "d")


def follow(layout: Layout, views: Sequence[fx.Node]) -> Layout | None:
    """Return the layout after these chained views; None if the result is no layout, or a view changes more than the
    layout."""
    for node in views:
        found = _after(layout, node)
        if found is None:
            return None
        layout = found
    return layout


def _after(layout: Layout, node: fx.Node) -> Layout | None:
    rank, kind = len(layout), view.kind(node)
    dims = view.swapped_dims(node)
    if dims is not None:
        swapped = {dims[0]: layout[dims[1]], dims[1]: layout[dims[0]]}
        return tuple(swapped.get(dim, name) for dim, name in enumerate(layout))
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
    """Return the index that takes rows per token, (T, R), from a table of cos or sin; None if heads or sequences
    differ.

    layout: that of x, the query that the table is multiplied with.
    """
    sizes = view.shape(table)
    tokens = _size(x, layout.index("t"))
    if sizes is None or not 2 <= len(sizes) <= len(layout):
        return None
    index: list[Any] = []
    for name, size in zip(layout[-len(sizes) : -1], sizes, strict=False):
        if name == "t" and same_sizes((size,), (tokens,)):
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


def rows(x: fx.Node, layout: Layout) -> Viewed:
    """Return a query or key of this layout seen as rows (T, H, D)."""
    first, second = layout.index("h"), layout.index("t")
    swap = (Swap(first, second),) if first < second else ()
    return Viewed(x, (*swap, Index((0,))) if "b" in layout else swap)


def table_rows(table: fx.Node, index: tuple[Any, ...]) -> Viewed:
    """Return a table seen as the rows (T, R) that an index picks."""
    return Viewed(table, (Index(index),) if index else ())
