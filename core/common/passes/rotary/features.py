"""Describes a tensor feature by feature in terms of another tensor x: elements of x times entries of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import fx

Table = tuple[fx.Node, str]
"""A factor: a node, and "" for its value, "real" or "imag" for a part of a complex one."""

Column = tuple[tuple[int, ...], tuple[int, ...]]
"""For each feature: its source, ±(i + 1) for ±x[..., i] and 0 for none, and its index in the table (empty without
table)."""


@dataclass(frozen=True, slots=True)
class Features:
    """A node's value: per feature the sum, over the columns, of an element of x times an element of the table.

    tail: sizes of the dimensions after x's leading ones. dtype: the node's, of the parts where it is complex. wide: the
    dtype in which the products were taken. rounded: whether their sum has been cast to a narrower one since.
    """

    tail: tuple[int, ...]
    columns: Mapping[Table | None, Column]
    dtype: torch.dtype
    wide: torch.dtype | None = None
    rounded: bool = False
    is_complex: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing has been multiplied yet."""
        return None in self.columns and len(self.columns) == 1


def negated(features: Features) -> Features:
    """Return the features with their signs turned."""
    columns = {table: (tuple([-s for s in sources]), at) for table, (sources, at) in features.columns.items()}
    return replace(features, columns=columns)


def gather(features: Features, picks: Sequence[int], tail: tuple[int, ...]) -> Features:
    """Return the features at these flat positions, laid out as `tail`."""
    columns = {
        table: (tuple([sources[i] for i in picks]), tuple([at[i] for i in picks]) if at else ())
        for table, (sources, at) in features.columns.items()
    }
    return replace(features, columns=columns, tail=tail)


@lru_cache(maxsize=1024)
def _along(tail: tuple[int, ...], axis: int, indices: range) -> tuple[int, ...]:
    """Return the flat positions of a selection along one axis."""
    inner, size = prod(tail[axis + 1 :]), tail[axis]
    return tuple(
        (outer * size + i) * inner + k for outer in range(prod(tail[:axis])) for i in indices for k in range(inner)
    )


@lru_cache(maxsize=256)
def permuted(tail: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the flat positions of a permutation of the axes."""
    steps = [prod(tail[axis + 1 :]) for axis in axes]
    places = product(*(range(tail[axis]) for axis in axes))
    return tuple(sum(i * step for i, step in zip(place, steps, strict=True)) for place in places)


def select(features: Features, axis: int, indices: range, *, drop: bool = False) -> Features:
    """Return a selection along one axis; drop: of one element, whose axis goes."""
    tail = features.tail
    if not drop and indices == range(tail[axis]):
        return features
    kept = tail[:axis] + (() if drop else (len(indices),)) + tail[axis + 1 :]
    return gather(features, _along(tail, axis, indices), kept)


def index_tail(features: Features, items: Sequence[object]) -> Features | None:
    """Return `features[items]` as Python indexes, or None where an index is no number, slice of numbers or None."""
    axis = 0
    for item in items:
        if item is None:
            features = replace(features, tail=(*features.tail[:axis], 1, *features.tail[axis:]))
            axis += 1
            continue
        if axis >= len(features.tail):
            return None
        size = features.tail[axis]
        if isinstance(item, slice):
            if any(not isinstance(bound, (int, type(None))) for bound in (item.start, item.stop, item.step)):
                return None
            features = select(features, axis, range(size)[item])
            axis += 1
        elif isinstance(item, int) and -size <= item < size:
            features = select(features, axis, range(item % size, item % size + 1), drop=True)
        else:
            return None
    return features


def concatenated(parts: Sequence[Features], axis: int, dtype: torch.dtype) -> Features | None:
    """Return the parts joined along an axis, or None where their other sizes or the dtypes of products differ."""
    tails = tuple(part.tail for part in parts)
    others = {tail[:axis] + tail[axis + 1 :] for tail in tails}
    wides = {part.wide for part in parts if part.wide is not None}
    if len(others) != 1 or len(wides) > 1:
        return None
    columns: dict[Table | None, Column] = {}
    for table in dict.fromkeys(table for part in parts for table in part.columns):
        sources: list[int] = []
        places: list[int] = []
        for part in parts:
            absent = (0,) * prod(part.tail)
            own, at = part.columns.get(table, (absent, () if table is None else absent))
            sources += own
            places += at
        columns[table] = (tuple(sources), tuple(places))
    whole = Features(
        (sum(prod(tail) for tail in tails),),
        columns,
        dtype,
        next(iter(wides), None),
        any(part.rounded for part in parts),
    )
    tail = (*tails[0][:axis], sum(tail[axis] for tail in tails), *tails[0][axis + 1 :])
    return replace(whole, tail=tail) if axis == 0 else gather(whole, _interleaved(tails, axis), tail)


@lru_cache(maxsize=256)
def _interleaved(tails: tuple[tuple[int, ...], ...], axis: int) -> tuple[int, ...]:
    """Return where each element of a concatenation along `axis` lies when the parts are laid end to end."""
    blocks = [prod(tail[axis:]) for tail in tails]
    starts = [sum(prod(tail) for tail in tails[:number]) for number in range(len(tails))]
    return tuple(
        start + outer * block + k
        for outer in range(prod(tails[0][:axis]))
        for start, block in zip(starts, blocks, strict=True)
        for k in range(block)
    )
