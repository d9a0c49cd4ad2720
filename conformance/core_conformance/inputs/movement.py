"""Torch's operators that move, select, count or cast: each has one right answer, computed in plain Python on lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw

Inputs = Callable[[Draw], tuple[Any, ...]]
_ROWS, _WIDTH, _PICKED = 12, 33, 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Mover:
    """One operator."""

    name: str
    #: Runs it, on tensors of the device.
    call: Callable[..., Tensor]
    #: Gives the right answer: nested lists in and out.
    lists: Callable[..., Any]
    #: Draws its arguments.
    inputs: Inputs
    #: The dtype of the answer, None for that of the values.
    result: torch.dtype | None = None
    #: Whether torch warns about arguments with gaps in memory.
    dense: bool = False


def distinct(draw: Draw, rows: int = _ROWS, width: int = _WIDTH) -> Tensor:
    """Return rows of numbers that differ from each other, and that every dtype holds exactly."""
    order = draw(rows, width, dtype=torch.float64).argsort(-1)
    return ((order - width // 2).double() / 4).to(draw.dtype)


def _chosen(draw: Draw, count: int, below: int) -> Tensor:
    """Return `count` different indices."""
    return draw(below, dtype=torch.float64).argsort()[:count]


def _indexed(draw: Draw) -> tuple[Tensor, Tensor]:
    return distinct(draw), draw(_ROWS, _WIDTH, dtype=torch.float64).argsort(-1)[:, :_PICKED]


def _placed(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return distinct(draw), _chosen(draw, _PICKED, _ROWS), distinct(draw, _PICKED)


def _with_rows(x: list[Any], index: list[int], rows: list[Any]) -> list[Any]:
    given = dict(zip(index, rows, strict=True))
    return [given.get(i, row) for i, row in enumerate(x)]


def _scattered(x: list[Any], index: list[Any], rows: list[Any]) -> list[Any]:
    return [
        [dict(zip(where, values, strict=True)).get(j, old) for j, old in enumerate(row)]
        for row, where, values in zip(x, index, rows, strict=True)
    ]


def _each(function: Callable[[float], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda x: [[function(value) for value in row] for row in x]


def _mask(draw: Draw) -> Tensor:
    return draw(_ROWS, _WIDTH, dtype=torch.float64) > 0.3


MOVING: tuple[Mover, ...] = (
    Mover(
        name="embedding",
        call=lambda x, index: functional.embedding(index, x),
        lists=lambda x, index: [x[i] for i in index],
        inputs=lambda draw: (distinct(draw), torch.tensor([3, 0, 3, 11, 5], device=draw.device)),
    ),
    Mover(
        name="index_select",
        call=lambda x, index: torch.index_select(x, 1, index),
        lists=lambda x, index: [[row[i] for i in index] for row in x],
        inputs=lambda draw: (distinct(draw), _chosen(draw, _PICKED, _WIDTH)),
    ),
    Mover(
        name="index",
        call=lambda x, index: x[index],
        lists=lambda x, index: [x[i] for i in index],
        inputs=lambda draw: (distinct(draw), _chosen(draw, _PICKED, _ROWS)),
    ),
    Mover(
        name="index_put",
        call=lambda x, index, rows: x.clone().index_put_((index,), rows),
        lists=_with_rows,
        inputs=_placed,
    ),
    Mover(
        name="index_copy",
        call=lambda x, index, rows: x.clone().index_copy_(0, index, rows),
        lists=_with_rows,
        inputs=_placed,
    ),
    Mover(
        name="gather",
        call=lambda x, index: torch.gather(x, 1, index),
        lists=lambda x, index: [[row[i] for i in where] for row, where in zip(x, index, strict=True)],
        inputs=_indexed,
    ),
    Mover(
        name="scatter",
        call=lambda x, index, rows: torch.scatter(x, 1, index, rows),
        lists=_scattered,
        inputs=lambda draw: (*_indexed(draw), distinct(draw, _ROWS, _PICKED)),
    ),
    Mover(
        name="where",
        call=lambda mask, a, b: torch.where(mask, a, b),
        lists=lambda mask, a, b: [
            [one if m else other for m, one, other in zip(*rows, strict=True)] for rows in zip(mask, a, b, strict=True)
        ],
        inputs=lambda draw: (_mask(draw), distinct(draw), distinct(draw)),
    ),
    Mover(
        name="masked_fill",
        call=lambda x, mask: x.masked_fill(mask, -math.inf),
        lists=lambda x, mask: [
            [-math.inf if m else value for value, m in zip(*rows, strict=True)] for rows in zip(x, mask, strict=True)
        ],
        inputs=lambda draw: (distinct(draw), _mask(draw)),
    ),
    Mover(
        name="cat",
        call=lambda a, b: torch.cat((a, b), dim=-1),
        lists=lambda a, b: [one + other for one, other in zip(a, b, strict=True)],
        inputs=lambda draw: (distinct(draw), distinct(draw, width=5)),
    ),
    Mover(
        name="transposed-copy",
        call=lambda x: x.t().contiguous(),
        lists=lambda x: [list(column) for column in zip(*x, strict=True)],
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="repeat_interleave",
        call=lambda x: x.repeat_interleave(3, dim=-1),
        lists=lambda x: [[value for value in row for _ in range(3)] for row in x],
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="tril",
        call=lambda x: torch.tril(x, 2),
        lists=lambda x: [[value if j <= i + 2 else 0.0 for j, value in enumerate(row)] for i, row in enumerate(x)],
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="clamp",
        call=lambda x: x.clamp(-1.5, 2.25),
        lists=_each(lambda value: min(max(value, -1.5), 2.25)),
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="round",
        call=torch.round,
        lists=_each(lambda value: float(round(value))),  # both take halves to the even number
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="compare",
        call=lambda a, b: a >= b,
        lists=lambda a, b: [[x >= y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)],
        inputs=lambda draw: (distinct(draw), distinct(draw)),
        result=torch.bool,
    ),
    Mover(
        name="compare-number",
        call=lambda x: x > 0.25,
        lists=_each(lambda value: value > 0.25),
        inputs=lambda draw: (distinct(draw),),
        result=torch.bool,
    ),
    Mover(
        name="full_like",
        call=lambda x: torch.full_like(x, -2.5),
        lists=_each(lambda value: -2.5),
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="new_zeros",
        call=lambda x: x.new_zeros(x.shape),
        lists=_each(lambda value: 0.0),
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="amax",
        call=lambda x: x.amax(-1),
        lists=lambda x: [max(row) for row in x],
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="argmax",
        call=lambda x: x.argmax(-1),
        lists=lambda x: [row.index(max(row)) for row in x],
        inputs=lambda draw: (distinct(draw),),
        result=torch.int64,
    ),
    Mover(
        name="topk",
        call=lambda x: x.topk(5, dim=-1).values,
        lists=lambda x: [sorted(row, reverse=True)[:5] for row in x],
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="topk-indices",
        call=lambda x: x.topk(5, dim=-1).indices,
        lists=lambda x: [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:5] for row in x],
        inputs=lambda draw: (distinct(draw),),
        result=torch.int64,
    ),
    Mover(
        name="sort",
        call=lambda x: x.sort(-1, descending=True).values,
        lists=lambda x: [sorted(row, reverse=True) for row in x],
        inputs=lambda draw: (distinct(draw),),
    ),
    Mover(
        name="sort-stable",
        call=lambda x: torch.sort(x, stable=True, dim=-1).indices,
        lists=lambda x: [sorted(range(len(row)), key=row.__getitem__) for row in x],
        inputs=lambda draw: ((distinct(draw).double() / 4).floor().to(draw.dtype),),
        result=torch.int64,
    ),
    Mover(
        name="bucketize",
        call=lambda x, ends: torch.bucketize(x, ends, right=True),
        lists=lambda x, ends: [[sum(end <= value for end in ends) for value in row] for row in x],
        inputs=lambda draw: (distinct(draw), torch.tensor([-3.0, 0.25, 2.0], device=draw.device).to(draw.dtype)),
        result=torch.int64,
        dense=True,
    ),
)
"""Run for every dtype; equal bits are asked for."""

COUNTING: tuple[Mover, ...] = (
    Mover(
        name="one_hot",
        call=lambda index: functional.one_hot(index, _WIDTH),
        lists=lambda index: [[int(i == j) for j in range(_WIDTH)] for i in index],
        inputs=lambda draw: (_chosen(draw, _PICKED, _WIDTH),),
        result=torch.int64,
    ),
    Mover(
        name="cumsum",
        call=lambda counts: counts.cumsum(0),
        lists=lambda counts: [sum(counts[: i + 1]) for i in range(len(counts))],
        inputs=lambda draw: (_chosen(draw, _WIDTH, _WIDTH),),
        result=torch.int64,
    ),
    Mover(
        name="arange",
        call=lambda like: torch.arange(3, 40, 2, device=like.device),
        lists=lambda like: list(range(3, 40, 2)),
        inputs=lambda draw: (_chosen(draw, 1, 1),),
        result=torch.int64,
    ),
    Mover(
        name="divide",
        call=lambda numbers: torch.stack((torch.div(numbers, 4, rounding_mode="floor"), numbers % 4)),
        lists=lambda numbers: [[n // 4 for n in numbers], [n % 4 for n in numbers]],
        inputs=lambda draw: (_chosen(draw, _WIDTH, _WIDTH) - 9,),
        result=torch.int64,
    ),
    Mover(
        name="sum-of-booleans",
        call=lambda mask: mask.sum(-1),
        lists=lambda mask: [sum(row) for row in mask],
        inputs=lambda draw: (_mask(draw),),
        result=torch.int64,
    ),
)
"""Operators on integers and booleans."""
