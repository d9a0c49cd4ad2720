"""The operations that a reader of a rotation follows, each as a function from features to features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import value_of, view
from core.common.passes.rotary.features import (
    Column,
    Features,
    Table,
    concatenated,
    gather,
    index_tail,
    negated,
    permuted,
    select,
)
from core.common.passes.rotary.reader import Operation, Reader


def _input(node: fx.Node) -> object:
    """Return the tensor that an operation of one tensor reads."""
    return view.operand(node, 0, "input")


def _cast(reader: Reader, node: fx.Node) -> Features | None:
    source, dtype = reader.read(_input(node)), view.dtype(node)
    if source is None or dtype is None or dtype == source.dtype:
        return source
    # Allowed casts are x.to(dtype) before the product and sum.to(x's dtype) after it; no rounding in between.
    exact = reader.keeps_x(source.dtype) if source.is_plain else view.is_exact(source.dtype, dtype)
    if source.is_complex or not (exact or dtype == reader.dtype):
        reader.fail(node, f"{node} rounds to {dtype} once more")
        return None
    rounded = source.rounded or (source.wide is not None and not view.is_exact(source.dtype, dtype))
    return replace(source, dtype=dtype, rounded=rounded)


def _mul(reader: Reader, node: fx.Node) -> Features | None:
    for operand, factor in view.orders(node):
        source = reader.read(operand)
        if source is not None and isinstance(factor, fx.Node) and reader.read(factor) is None:
            return _times(reader, node, source, factor)
    return None


def _times(reader: Reader, node: fx.Node, source: Features, table: fx.Node) -> Features | None:
    """Multiply with a table that has one value per feature, or with a complex one that has one per pair."""
    value, sizes, tail = value_of(node), view.shape(table) or (), reader.tail_of(node)
    if not isinstance(value, Tensor) or not sizes or not source.is_plain or tail is None:
        return None
    sources = source.columns[None][0]
    dtype = _part_dtype(value.dtype)
    if source.dtype != dtype and not reader.keeps_x(source.dtype):
        reader.fail(node, f"{node} is computed in {dtype} from {reader.x} rounded to {source.dtype}")
        return None
    if len(sizes) > len(reader.lead) + 1:
        reader.fail(node, f"the table {table} has more dimensions than {reader.x}")
        return None
    if source.is_complex:
        count = source.tail[0]
        if not value_of(table).is_complex() or len(source.tail) != 2 or sizes[-1] != count or tail != (count,):
            return None
        turned = tuple(s for i in range(count) for s in (-sources[2 * i + 1], sources[2 * i]))
        places = tuple(i // 2 for i in range(2 * count))
        columns: dict[Table | None, Column] = {(table, "real"): (sources, places), (table, "imag"): (turned, places)}
        return Features(source.tail, columns, dtype, wide=dtype, is_complex=True)
    if value.is_complex() or len(source.tail) != 1 or tail != source.tail or sizes[-1] != tail[0]:
        reader.fail(node, f"the table {table} {tuple(sizes)} has not one value per feature of {source.tail}")
        return None
    return Features(tail, {(table, ""): (sources, tuple(range(tail[0])))}, dtype, wide=dtype)


def _part_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _sum(reader: Reader, node: fx.Node) -> Features | None:
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = (reader.read(operand) for operand in node.args)
    if first is None or second is None or first.is_plain or second.is_plain:
        return None
    dtypes = {first.dtype, first.wide, second.dtype, second.wide, view.dtype(node)}
    if len(dtypes) > 1:
        reader.fail(node, f"the products that {node} adds are rounded before they are added")
        return None
    if first.tail != second.tail or first.is_complex or second.is_complex:
        return None
    if view.kind(node) == "sub":
        second = negated(second)
    columns = dict(first.columns)
    for table, column in second.columns.items():
        if table in columns:
            reader.fail(node, f"{node} adds two products with {table[0] if table else reader.x}")
            return None
        columns[table] = column
    return replace(first, columns=columns)


def _neg(reader: Reader, node: fx.Node) -> Features | None:
    source = reader.read(_input(node))
    return None if source is None else negated(source)


def _getitem(reader: Reader, node: fx.Node) -> Features | None:
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if isinstance(value_of(source), (tuple, list)):
        return _piece(reader, source, index) if isinstance(index, int) else None
    features = reader.read(source)
    if features is None or features.is_complex:
        return None
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    rank = len(view.shape(source) or ())
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - sum(item is not None for item in items) + 1)
    lead = len(reader.lead)
    if any(not isinstance(item, slice) or not _is_all(item) for item in items[:lead]):
        return None
    return index_tail(features, items[lead:])


def _is_all(item: slice) -> bool:
    return item.start in (None, 0) and item.stop is None and item.step in (None, 1)


def _piece(reader: Reader, parts: fx.Node, index: int) -> Features | None:
    """Read one member of a chunk, split or unbind."""
    kind = view.kind(parts)
    if kind not in ("chunk", "split", "split_with_sizes", "unbind"):
        return None
    features = reader.read(_input(parts))
    dim = view.operand(parts, 1 if kind == "unbind" else 2, "dim", 0)
    axis = reader.axis(_input(parts), dim)
    if features is None or features.is_complex or axis is None:
        return None
    reader.known[parts] = features
    members = value_of(parts)
    index %= len(members)
    if kind == "unbind":
        return select(features, axis, range(index, index + 1), drop=True)
    sizes = [member.shape[axis + len(reader.lead)] for member in members]
    start = sum(sizes[:index])
    return select(features, axis, range(start, start + sizes[index]))


def _slice(reader: Reader, node: fx.Node) -> Features | None:
    """Read aten's `slice(x, dim, start, end, step)` and `narrow(x, dim, start, length)`."""
    source = reader.read(_input(node))
    axis = reader.axis(_input(node), view.operand(node, 1, "dim", 0))
    if source is None or axis is None or source.is_complex:
        return None
    start = view.operand(node, 2, "start")
    if view.kind(node) == "narrow":
        length = view.operand(node, 3, "length")
        item = slice(start, start + length) if isinstance(start, int) and isinstance(length, int) else None
    else:
        item = slice(start, view.operand(node, 3, "end"), view.operand(node, 4, "step"))
    return None if item is None else index_tail(source, [slice(None)] * axis + [item])


def _select_one(reader: Reader, node: fx.Node) -> Features | None:
    source = reader.read(_input(node))
    axis = reader.axis(_input(node), view.operand(node, 1, "dim"))
    if source is None or axis is None or source.is_complex:
        return None
    return index_tail(source, [slice(None)] * axis + [view.operand(node, 2, "index")])


def _join(reader: Reader, node: fx.Node) -> Features | None:
    """Read `cat` and `stack` along a tail dimension."""
    parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, fx.Node) for part in parts):
        return None
    is_stack = view.kind(node) == "stack"
    axis = reader.axis(parts[0], view.operand(node, 1, "dim", 0), extra=int(is_stack))
    found = [reader.read(part) for part in parts]
    read = [part for part in found if part is not None]
    dtype = view.dtype(node)
    if len(read) != len(found) or axis is None or dtype is None or any(part.is_complex for part in read):
        return None
    turned = any(part.wide is not None for part in read)
    if not all(_may_widen(reader, part, dtype, turned=turned) for part in read):
        reader.fail(node, f"{node} rounds one of its parts")
        return None
    if is_stack:
        read = [replace(part, tail=(*part.tail[:axis], 1, *part.tail[axis:])) for part in read]
    if any(len(part.tail) <= axis for part in read):
        return None
    return concatenated(read, axis, dtype)


def _may_widen(reader: Reader, part: Features, dtype: torch.dtype, *, turned: bool) -> bool:
    """Return whether a concatenated part keeps its values: unrotated features of x beside rotated ones must be
    unrounded."""
    if part.is_plain and not reader.keeps_x(part.dtype):
        return part.dtype == dtype and not turned
    return view.is_exact(part.dtype, dtype)


def _reshape(reader: Reader, node: fx.Node) -> Features | None:
    source, tail = reader.read(_input(node)), reader.tail_of(node)
    fits = source is not None and tail is not None and prod(tail) == prod(source.tail)
    if source is None or tail is None or not fits or source.is_complex or view.dtype(node) != source.dtype:
        return None
    return replace(source, tail=tail)


def _transpose(reader: Reader, node: fx.Node) -> Features | None:
    source = reader.read(_input(node))
    axes = [reader.axis(node, view.operand(node, i, f"dim{i - 1}")) for i in (1, 2)]
    if source is None or source.is_complex or axes[0] is None or axes[1] is None:
        return None
    order = list(range(len(source.tail)))
    order[axes[0]], order[axes[1]] = axes[1], axes[0]
    return gather(source, permuted(source.tail, tuple(order)), tuple(source.tail[axis] for axis in order))


def _same(reader: Reader, node: fx.Node) -> Features | None:
    return reader.read(_input(node))


def _as_complex(reader: Reader, node: fx.Node) -> Features | None:
    source = reader.read(_input(node))
    fits = source is not None and source.is_plain and not source.is_complex and source.tail[1:] == (2,)
    return replace(source, is_complex=True) if source is not None and fits else None


def _as_real(reader: Reader, node: fx.Node) -> Features | None:
    source = reader.read(_input(node))
    return replace(source, is_complex=False) if source is not None and source.is_complex else None


OPERATIONS: Mapping[str, Operation] = {
    "cast": _cast,
    "mul": _mul,
    **dict.fromkeys(("add", "sub"), _sum),
    "neg": _neg,
    "getitem": _getitem,
    **dict.fromkeys(("slice", "narrow"), _slice),
    "select": _select_one,
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape),
    "transpose": _transpose,
    **dict.fromkeys(("contiguous", "clone"), _same),
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
"""The function that reads each kind of node that may come between x and the rotated result."""
MOVES = frozenset(OPERATIONS) - {"mul", "add", "sub"} | {"chunk", "split", "split_with_sizes", "unbind"}
"""Kinds of nodes that only move, negate or cast features."""
