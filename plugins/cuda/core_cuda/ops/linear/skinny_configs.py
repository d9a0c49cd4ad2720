"""How products with few rows are divided among programs: the default for any size, and what a tuner tries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import triton

from core_cuda.ops import launching

MAX_ROWS = 128
_SHARED_BYTES = 100 * 1024  # where two programs are to fit a multiprocessor
_LEFT_BYTES = 7 * 1024  # what a program that has a multiprocessor for itself leaves of its shared memory
_DRIFTING = 4
_PREFERRED_ROWS, _FEW_ROWS, _MANY_ROWS = 16, 32, 64
_NARROW, _WIDE, _ROUNDS = 32, 128, 4
"""Columns of a tile for many rows; and how often wide ones have to fill the multiprocessors."""
_HOPPER_COLUMNS = 64
_HOPPER_ROW_BYTES, _HOPPER_STAGES, _MOST_HOPPER_STAGES = 512, 4, 12
"""Of the kernel for compute capability 9: bytes of a row of the weight in a tile, of gate and up together; and how many
tiles of 64 rows have to be under way, or it has half of these bytes."""
_MAX_SPLITS = 8
_ROW_TILES = ((2, 2048, 4), (4, 1024, 4), (8, 512, 4), (8, 1024, 4), (16, 512, 8), (4, 512, 2))
"""block_n, block_k and num_warps worth trying for a single row."""
_TILES = (
    (32, 256, False, 4),
    (64, 128, False, 4),
    (64, 128, True, 4),
    (64, 256, True, 4),
    (128, 64, True, 4),
    (128, 128, True, 8),
    (128, 128, False, 8),
)
"""block_n, block_k (of 16-bit elements), swap and num_warps worth trying for several rows."""


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """The configuration of a product."""

    #: "tile"; "row", for a single row of x, which reads none of num_stages, split_k, swap and fetch; or "hopper", for
    #: compute capability 9, which reads block_k, num_stages and split_k
    kernel: str
    #: rows of the weight's tile
    block_n: int
    #: columns of the weight's tile
    block_k: int
    num_warps: int = 4
    #: tiles being loaded into shared memory
    num_stages: int = 1
    #: programs that share a tile's K
    split_k: int = 1
    #: whether the weight's tile is the left operand of the matrix units, whose smallest height is larger than their
    #: smallest width
    swap: bool = False
    #: whether the beginning of each row of the weight is fetched into the L2 cache before the kernel waits for x
    fetch: bool = False


def default_config(
    rows: int, columns: int, depth: int, *, gated: bool = False, bits: int = 16, portable: bool = False
) -> SkinnyConfig:
    """Return a configuration for x (rows, depth) times a weight (columns, depth), or (2 * columns, depth) if gated.

    bits: per element of x and weight; portable: of the kernels that every GPU has. It is a guess from the sizes alone,
    used for sizes that were not measured.
    """
    units = launching.num_multiprocessors()
    if rows == 1 and bits >= 16:
        block_n = next((size for size in (8, 4) if triton.cdiv(columns, size) >= 4 * units), 2)
        return SkinnyConfig("row", block_n // 2 if gated else block_n, 1024)
    if is_hopper() and not portable:
        split_k = _hopper_split(rows, columns, depth, gated=gated, bits=bits)
        return _hopper(rows, split_k, gated=gated, bits=bits)
    if rows > 32 and timed(rows, columns, gated=gated) and bits >= 16:
        return _many_rows(rows, columns, depth)
    block_n = 128 if rows > 32 and columns >= 128 * units // 4 and not gated else 64
    block_k = 128 * 16 // bits
    most = min(_SHARED_BYTES, launching.shared_bytes_of_two()) if rows <= 64 else _most_shared()
    stages = _stages(rows, block_n, block_k, gated=gated, bits=bits, most=most)
    split_k = _split(rows, columns, depth, block_n, block_k, 2 * units)
    return SkinnyConfig("tile", block_n, block_k, 4, stages, split_k, swap=rows <= 64)


def is_hopper() -> bool:
    """Tell whether the current GPU has the kernel for compute capability 9, which Triton's interpreter cannot run."""
    return not launching.INTERPRETED and launching.capability()[0] == 9


def preferred_rows() -> int:
    """Return up to how many rows the plugin's kernels serve products that nobody measured."""
    return _MANY_ROWS if is_hopper() else _PREFERRED_ROWS


def timed(rows: int, columns: int, *, gated: bool = False) -> bool:
    """Tell whether the default of such a size is worth timing against cuBLAS, where nobody measured it.

    Up to 32 rows always. Up to 64 where the result has so few columns that narrow tiles of them fill the
    multiprocessors about once, or so many that wide tiles fill them several times: on an H100 and an H200 kernels of
    the plugin won there by up to 8 %. Between these, behind a gate and for more rows they lost at every size. The
    kernel for compute capability 9 is always timed.
    """
    if rows <= _FEW_ROWS or is_hopper():
        return rows <= MAX_ROWS
    tiles = columns / launching.num_multiprocessors()
    return rows <= _MANY_ROWS and not gated and (tiles <= _NARROW or tiles >= _WIDE * _ROUNDS)


def _many_rows(rows: int, columns: int, depth: int) -> SkinnyConfig:
    """Return a configuration for 33 to 64 rows: deep narrow tiles, or for many columns wide ones, of which two fit."""
    units = launching.num_multiprocessors()
    if columns <= _NARROW * units:
        stages = min(4, _stages(rows, _NARROW, 256, gated=False, bits=16, most=_most_shared()))
        split_k = _split(rows, columns, depth, _NARROW, 256, units)
        return SkinnyConfig("tile", _NARROW, 256, 4, max(stages, 1), split_k)
    most = min(_SHARED_BYTES, launching.shared_bytes_of_two())
    return SkinnyConfig("tile", _WIDE, 128, 8, max(1, _stages(rows, _WIDE, 128, gated=False, bits=16, most=most)))


def _hopper(rows: int, split_k: int, *, gated: bool, bits: int, halves: int = 1) -> SkinnyConfig:
    """Return a configuration with tiles of 64 rows of the weight; halves: into how many its default depth is cut."""
    height, parts = max(8, triton.next_power_of_2(rows)), 2 if gated else 1
    room = _most_shared() - 2 * _HOPPER_COLUMNS * height  # where results change places before they are stored
    row_bytes = _HOPPER_ROW_BYTES // parts // halves
    stages = room // ((_HOPPER_COLUMNS * parts + height) * row_bytes)
    if stages * parts < _HOPPER_STAGES:
        row_bytes, stages = row_bytes // 2, stages * 2
    stages = min(_MOST_HOPPER_STAGES, stages)
    return SkinnyConfig("hopper", _HOPPER_COLUMNS, row_bytes * 8 // bits, 4, stages, split_k, swap=True)


def _hopper_split(rows: int, columns: int, depth: int, *, gated: bool, bits: int) -> int:
    """Return how many programs share a tile's K: what takes least by times measured on an H100, in bytes of the weight.

    With p programs the memory's rate is that of all of them times p / (p + 14 + rows / 4); waiting for and adding the
    sums of one more program takes as long as some MB.
    """
    tiles, units = triton.cdiv(columns, _HOPPER_COLUMNS), launching.num_multiprocessors()
    num_bytes = columns * depth * bits // 8 * (2 if gated else 1)

    def cost(split: int) -> float:
        slower = 1 + (14 + rows / 4) / min(tiles * split, units)
        return float(num_bytes * slower + (split - 1) * (1.6e6 + 64e3 * rows))

    return min(range(1, max(1, min(_MAX_SPLITS, units // tiles)) + 1), key=cost)


def candidates(rows: int, columns: int, depth: int, *, gated: bool = False, bits: int = 16) -> Iterator[SkinnyConfig]:
    """Yield the configurations worth measuring for these sizes, the default first."""
    seen = {default_config(rows, columns, depth, gated=gated, bits=bits)}
    yield from seen
    for config in _all(rows, columns, depth, gated=gated, bits=bits):
        if config not in seen:
            seen.add(config)
            yield config


def _all(rows: int, columns: int, depth: int, *, gated: bool, bits: int) -> Iterator[SkinnyConfig]:
    units = launching.num_multiprocessors()
    if rows == 1 and bits >= 16:
        for block_n, block_k, warps in _ROW_TILES:
            yield SkinnyConfig("row", block_n, block_k, warps)
    if is_hopper():
        tiles = triton.cdiv(columns, _HOPPER_COLUMNS)
        for split_k in range(1, max(1, min(_MAX_SPLITS, units // tiles)) + 1):
            for halves in (1, 2):
                yield _hopper(rows, split_k, gated=gated, bits=bits, halves=halves)
    for block_n, block_k, swap, warps in _TILES:
        deep = block_k * 16 // bits
        if swap and rows > 64:
            continue
        for per_unit in (2, 1):
            stages = _stages(rows, block_n, deep, gated=gated, bits=bits, most=_most_shared() // per_unit - 1024)
            if stages < 2:
                continue
            splits = [_split(rows, columns, depth, block_n, deep, rounds * per_unit * units) for rounds in (1, 2)]
            for split_k in dict.fromkeys(splits):
                for fetch in (False, True):
                    yield SkinnyConfig("tile", block_n, deep, warps, stages, split_k, swap=swap, fetch=fetch)


def _most_shared() -> int:
    """Return the bytes of shared memory of a program that has a multiprocessor for itself."""
    return launching.shared_bytes() - _LEFT_BYTES


def _stages(rows: int, block_n: int, block_k: int, *, gated: bool, bits: int, most: int) -> int:
    """Return for how many stages tiles of x and weight fit into `most` bytes of shared memory, 8 at most."""
    height: int = max(16, triton.next_power_of_2(rows))
    tile = (height + block_n * (2 if gated else 1)) * block_k * bits // 8
    return min(8, launching.num_stages(most, tile))


def _split(rows: int, columns: int, depth: int, block_n: int, block_k: int, slots: int) -> int:
    """Return the number of programs that share a tile's K: one that fills the slots evenly and adds few bytes to move.

    Partial sums are written and read once more, in fp32, but stay in the L2 cache, which counts as twice as fast as
    memory. For a gated product, `columns` are those of its result.
    """
    tiles, steps = triton.cdiv(columns, block_n), triton.cdiv(depth, block_k)

    def cost(split: int) -> float:
        rounds = tiles * split / slots
        shares = 4 * split * rows if split > 1 else 0
        # Programs of many rounds drift apart, and no round waits for its slowest.
        return (2 * depth + shares) * (math.ceil(rounds) / rounds if rounds < _DRIFTING else 1.0)

    return min(range(1, max(1, min(16, steps // 2)) + 1), key=cost)
