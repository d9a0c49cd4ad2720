"""Columns of one tensor laid out anew, as several results in one launch."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import as_rows, row_starts

MAX_RESULTS = 4
MAX_BLOCKS = 8
"""Of a result: each element is compared with the beginning of each block."""

_MAX_COLUMNS = 2**20
"""Of x: a pass looks at each of them."""

Block = tuple[int, int, int, int]
"""The first column, how many groups of columns, from one group to the next, columns of a group."""


def why_not(x: Any) -> str:
    """Return why the kernel can't take columns of x, or ""."""
    if x.dtype not in DTYPES:
        return f"it is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if not x.dim() or type(x.shape[-1]) is not int:
        return "its rows have a number of columns that varies, and the kernel takes one that is known"
    return f"its rows have more than {_MAX_COLUMNS} columns" if x.shape[-1] > _MAX_COLUMNS else ""


def width_of(blocks: Sequence[Block]) -> int:
    """Return how many columns blocks have together."""
    return sum(groups * width for _, groups, _, width in blocks)


def _results(blocks: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[Block, ...]]:
    """Yield the blocks of each result."""
    each = zip(*(blocks[i::4] for i in range(4)), strict=True)
    yield from (tuple(next(each) for _ in range(count)) for count in counts)


def _columns(blocks: Sequence[Block]) -> list[int]:
    return [
        start + group * stride + column
        for start, groups, stride, width in blocks
        for group in range(groups)
        for column in range(width)
    ]


def _reference(x: Tensor, blocks: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    found = (torch.tensor(_columns(each), device=x.device) for each in _results(blocks, counts))
    return [x.index_select(-1, columns).contiguous() for columns in found]


def _fake(x: Tensor, blocks: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], width_of(each))) for each in _results(blocks, counts)]


@own_kernel("gather_columns(Tensor x, int[] blocks, int[] counts) -> Tensor[]", _fake, _reference)
def gather_columns(x: Tensor, blocks: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """Return for each count a contiguous tensor (..., M) of columns of x (..., N), any strides; fp32, bf16 or fp16.

    blocks: four numbers for each block of columns, see `Block`; counts: how many blocks each result is made of, one
    after the other. Every bit stays. Raises ValueError for columns that x does not have, and for more results, or
    blocks of a result, than the kernel takes.
    """
    parts = list(_results(blocks, counts))
    if reason := why_not(x) or _wrong(x.shape[-1], parts):
        raise ValueError(f"core_cuda::gather_columns: {reason}")
    made = _fake(x, blocks, counts)
    rows = as_rows({"x": x}, {f"out{i}": out for i, out in enumerate(made)})
    widths = [out.shape[-1] for out in made]
    block, together, num_warps = _tile(rows.count, widths)
    pieces = [triton.cdiv(width, block) for width in widths]
    starts = list(accumulate(pieces, initial=0))
    tables = [_table(each) for each in parts]
    given = rows.arguments
    launching.launch(
        gather_kernel,
        (triton.cdiv(rows.count, together) * starts[-1],),
        **{name: given[name] for name in ("x", "num_rows", "inner", "x_outer", "x_inner", "FLAT")},
        outs=tuple(tuple(given[f"out{i}{part}"] for part in ("", "_outer", "_inner")) for i in range(len(made))),
        WIDTHS=tuple(widths),
        STARTS=tuple(starts),
        VECTORS=tuple(_vector(each, x.itemsize) for each in tables),
        FIRSTS=tuple(accumulate(counts, initial=0)),
        BLOCKS=tuple(number for each in tables for block in each for number in block),
        RESULTS=len(made),
        BLOCK=block,
        ROWS=together,
        num_warps=num_warps,
    )
    rows.flush()
    return made


def _wrong(width: int, results: Sequence[Sequence[Block]]) -> str:
    """Return what a call asks for that can't be done, or ""."""
    if not 0 < len(results) <= MAX_RESULTS or not all(0 < len(each) <= MAX_BLOCKS for each in results):
        return f"1 to {MAX_RESULTS} results of 1 to {MAX_BLOCKS} blocks each are made, and {results} are asked for"
    for start, groups, stride, size in (block for each in results for block in each):
        first, last = sorted((start, start + (groups - 1) * stride))
        if groups < 1 or size < 1 or first < 0 or last + size > width:
            return f"x has {width} columns, and block {(start, groups, stride, size)} is not among them"
    return ""


def _tile(num_rows: int, widths: Sequence[int]) -> tuple[int, int, int]:
    """Return columns and rows of a program, and its warps: small ones where few rows leave multiprocessors idle."""
    many = num_rows * sum(widths) >= 4096 * launching.num_multiprocessors()
    room = 2048 if many else 512
    block = min(room, triton.next_power_of_2(max(widths)))
    together = min(room // block, triton.next_power_of_2(max(num_rows, 1)))
    # 16 bytes of half precision to a thread and load; two loads where there is enough to do
    return block, together, max(block * together // (512 if many else 256), 1)


def _table(blocks: Sequence[Block]) -> list[Block]:
    """Return the beginning in the result, the start in x, the stride of groups and the width of each block."""
    begins = accumulate((groups * width for _, groups, _, width in blocks), initial=0)
    pairs = zip(begins, blocks, strict=False)  # the last begin is the end
    return [(begin, start, stride if groups > 1 else 0, width) for begin, (start, groups, stride, width) in pairs]


def _vector(table: Sequence[Block], itemsize: int) -> int:
    """Return how many elements, from a multiple of that on, lie side by side everywhere; 16 bytes at most."""
    common = math.gcd(*(number for block in table for number in block))
    return min(common & -common, 16 // itemsize)


@triton.jit
def _sources(columns, BLOCKS: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, VECTOR: tl.constexpr):
    """Return which columns of x become these of a result; FIRST to END: its blocks, as `_table` has them."""
    found = columns
    for i in tl.static_range(FIRST, END):
        inside = columns - BLOCKS[4 * i]
        group, column = inside // BLOCKS[4 * i + 3], inside % BLOCKS[4 * i + 3]
        there = group * BLOCKS[4 * i + 2] + column + BLOCKS[4 * i + 1]
        found = tl.where(inside >= 0, there, found)
    return tl.max_contiguous(tl.multiple_of(found, VECTOR), VECTOR)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    x, outs, num_rows, inner, x_outer, x_inner, WIDTHS: tl.constexpr, STARTS: tl.constexpr, VECTORS: tl.constexpr,
    FIRSTS: tl.constexpr, BLOCKS: tl.constexpr, RESULTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of ROWS rows of one of the results, which share out the programs of these rows.

    outs: each result and its strides of outer and inner. By result, WIDTHS: its columns; STARTS: its first program
    of a row; FIRSTS: its first block, both with an end behind the last; VECTORS: see `_vector`.
    """
    piece = tl.program_id(0) % STARTS[RESULTS]
    row = (tl.program_id(0) // STARTS[RESULTS]) * ROWS + tl.arange(0, ROWS)
    x_row = x + row_starts(row, inner, x_outer, x_inner, FLAT)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    for i in tl.static_range(RESULTS):
        if (piece >= STARTS[i]) & (piece < STARTS[i + 1]):
            columns = (piece - STARTS[i]) * BLOCK + tl.arange(0, BLOCK)
            mask = (row < num_rows)[:, None] & (columns < WIDTHS[i])[None, :]
            sources = _sources(columns, BLOCKS, FIRSTS[i], FIRSTS[i + 1], VECTORS[i])
            out_row = outs[i][0] + row_starts(row, inner, outs[i][1], outs[i][2], FLAT)
            values = tl.load(x_row[:, None] + sources[None, :], mask=mask)
            tl.store(out_row[:, None] + columns[None, :], values, mask=mask)
