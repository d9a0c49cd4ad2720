"""Which columns of a base's rows a tensor shows, read off the strides of both: no list of the ways to make a view."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.common.passes import expression
from core_cuda.ops.gather_columns import Block

Columns = NDArray[np.int64]
_Sizes = tuple[Any, ...]
"""Numbers, and expressions in place of symbolic ones: what layers have alike is then computed once."""
_Level = tuple[Any, Any]  # a size and a stride


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they lie in memory. levels: sizes and strides that lead to each of them, as few as will do."""

    levels: tuple[_Level, ...]
    offset: Any
    width: int


def rows_of(base: Tensor) -> Rows:
    """Return the rows of a tensor (..., N) whose last dimension has a known size."""
    sizes, strides, offset = _layout(base)
    return Rows(_levels(sizes[:-1], strides[:-1]), offset, base.shape[-1])


def fresh_rows(base: Tensor, width: int) -> Rows:
    """Return as many rows as a tensor (..., N) has, contiguous ones of `width`."""
    sizes = _layout(base)[0][:-1]
    return Rows(_levels(sizes, _even(sizes, width)), 0, width)


def _even(sizes: _Sizes, stride: Any) -> _Sizes:
    """Return the strides of dimensions that lie in memory in order, the last in this stride."""
    strides: _Sizes = ()
    for size in reversed(sizes):
        strides, stride = (stride, *strides), stride * size
    return strides


def columns_in(value: Tensor, rows: Rows) -> Columns | None:
    """Return the columns of a row that a tensor in the same memory shows for each row, in its own trailing shape.

    None where its leading dimensions do not walk the same rows in the same order, or where it shows other numbers than
    lie there: the negative ones, as the imaginary part of a conjugate.
    """
    return None if value.is_neg() or value.is_conj() else _columns_in(*_layout(value), rows)


def _layout(value: Tensor) -> tuple[_Sizes, _Sizes, Any]:
    return (
        *(tuple(map(expression, each)) for each in (value.shape, value.stride())),
        expression(value.storage_offset()),
    )


@lru_cache(maxsize=1024)
def _levels(sizes: _Sizes, strides: _Sizes) -> tuple[_Level, ...]:
    """Join dimensions through which memory is walked in even steps; those of size 1 lead nowhere."""
    found: list[_Level] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)


@lru_cache(maxsize=1024)
def _columns_in(sizes: _Sizes, strides: _Sizes, offset: Any, rows: Rows) -> Columns | None:
    begin = offset - rows.offset
    for lead in range(len(sizes) + 1):
        own = sizes[lead:]
        if not all(_is_number(each) for each in (begin, *own, *strides[lead:])):
            continue
        if _levels(sizes[:lead], strides[:lead]) != rows.levels:
            continue
        columns = np.full(tuple(map(int, own)), int(begin), dtype=np.int64)
        for dim, (size, stride) in enumerate(zip(own, strides[lead:], strict=True)):
            columns += (np.arange(int(size)) * int(stride)).reshape(-1, *(1,) * (len(own) - dim - 1))
        if columns.size and columns.min() >= 0 and columns.max() < rows.width:
            columns.flags.writeable = False  # others get it too
            return columns
    return None


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_Integer", False))


def blocks_of(columns: Columns, most: int) -> tuple[Block, ...]:
    """Return columns, in order, as blocks; none where it takes more than `most`."""
    flat = columns.ravel()
    edges = np.flatnonzero(np.diff(flat) != 1) + 1
    runs = zip(flat[[0, *edges]].tolist(), np.diff([0, *edges, flat.size]).tolist(), strict=True)
    found: list[Block] = []
    for start, width in runs:
        first, groups, stride, size = found[-1] if found else (0, 0, 0, 0)
        step = start - first - (groups - 1) * stride
        if size == width and (groups == 1 or step == stride):
            found[-1] = (first, groups + 1, start - first if groups == 1 else stride, size)
        elif len(found) == most:
            return ()
        else:
            found.append((start, 1, 0, width))
    return tuple(found)
