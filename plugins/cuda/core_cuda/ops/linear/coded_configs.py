"""How products with weights of codes are divided among programs: the default for any size, and what a tuner tries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import triton

from core_cuda.ops import launching

MIN_GROUP = 32
"""Codes that a tile of the weight holds in a row at least; smaller groups of one scale have no kernel of their own."""
_X_BYTES = 2  # of an activation that is no code
_LEFT_BYTES = 7 * 1024  # what a program that has a multiprocessor for itself leaves of its shared memory
_MAX_SPLITS = 16
_MIN_STAGES, _MAX_STAGES = 2, 10
_FEW_ROWS = 32
"""Rows up to which two programs share a multiprocessor, with five stages, and the weight is fetched early. Fetching won
for most products of `core::linear` of so few rows that were tuned on an H200."""
_DRIFTING = 3  # rounds from which programs drift apart, so that none waits for the slowest
_WIDE_ROWS = 1024
"""Rows from which tiles of 256 columns are tried, and taken where they fill the multiprocessors twice."""


@dataclass(frozen=True, slots=True)
class CodedShape:
    """The sizes that a configuration depends on."""

    rows: int
    columns: int
    depth: int
    #: bits of a code of the weight
    bits: int
    #: neighbours in a row of the weight that share a scale; depth for one scale a row
    group: int
    #: whether x is codes of int8 too
    coded_x: bool = False

    @property
    def x_bytes(self) -> int:
        """Bytes of an element of x."""
        return 1 if self.coded_x else _X_BYTES


@dataclass(frozen=True, slots=True)
class CodedConfig:
    """The configuration of a product."""

    #: rows of x, rows of the weight and columns of both that a tile has
    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    #: tiles being loaded into shared memory
    num_stages: int = 2
    #: programs that share a tile's K
    split_k: int = 1
    #: whether the weight's tile is the left operand of the matrix units, whose smallest height is larger than their
    #: smallest width
    swap: bool = False
    #: whether the beginning of each row of the weight is fetched into the L2 cache before the kernel waits for x
    fetch: bool = False


_Tile = tuple[int, int, int, bool]
_TILES: Mapping[int, tuple[_Tile, ...]] = {
    16: ((64, 128, 4, False), (128, 128, 4, False), (128, 128, 4, True), (64, 256, 4, False)),
    32: ((128, 128, 4, False), (64, 128, 4, False), (128, 128, 4, True), (128, 128, 8, True)),
    64: ((128, 128, 8, True), (128, 128, 4, True), (64, 128, 4, True), (256, 64, 8, True)),
    128: ((128, 128, 8, True), (128, 64, 8, True), (128, 64, 4, True), (256, 64, 8, True)),
}
"""By block_m: block_n, block_k (of codes), num_warps and swap worth trying, the default first."""
_CODED_TILES: Mapping[int, tuple[_Tile, ...]] = {
    16: ((64, 256, 4, False), (128, 128, 4, False), (128, 256, 4, False), (128, 128, 4, True)),
    32: ((64, 256, 4, False), (128, 128, 4, False), (128, 256, 4, False), (128, 128, 4, True)),
    64: ((64, 256, 4, False), (64, 128, 4, False), (128, 128, 4, False), (128, 128, 4, True)),
    128: ((128, 128, 8, False), (256, 128, 8, False), (128, 128, 4, False), (64, 256, 4, False)),
}
"""The same where x is codes too."""


def why_no_tile(shape: CodedShape) -> str | None:
    """Return why the tiles of the kernel do not fit the groups of a weight, or None."""
    if _widest(shape) < MIN_GROUP:
        return f"groups of {shape.group} codes are no multiples of {MIN_GROUP}"
    return None


def default_config(shape: CodedShape) -> CodedConfig:
    """Return a configuration for sizes that were not measured."""
    block_m = _height(shape.rows)
    (block_n, block_k, num_warps, swap), wide, *_ = _tiles(shape)[block_m]
    units = launching.num_multiprocessors()
    if shape.coded_x and shape.rows >= _WIDE_ROWS:
        tiles = triton.cdiv(shape.rows, block_m) * triton.cdiv(shape.columns, wide[0])
        if tiles >= 2 * units:
            block_n, block_k, num_warps, swap = wide
    two_fit = block_m <= _FEW_ROWS or (shape.coded_x and block_m == 64)
    config = _fitted(shape, block_m, (block_n, block_k, num_warps, swap), 2 if two_fit else 1)
    return replace(config, fetch=block_m <= _FEW_ROWS)


def candidates(shape: CodedShape) -> Iterator[CodedConfig]:
    """Yield the configurations worth measuring for these sizes, the default first."""
    seen = {default_config(shape)}
    yield from seen
    heights = (_height(shape.rows), 64) if shape.rows > 64 else (_height(shape.rows),)
    for height in heights:
        for tile in _tiles(shape)[height]:
            for per_unit in (1, 2, 4):
                config = _fitted(shape, height, tile, per_unit)
                for each in (config, replace(config, fetch=True)):
                    if each.num_stages >= _MIN_STAGES and each not in seen:
                        seen.add(each)
                        yield each


def _tiles(shape: CodedShape) -> Mapping[int, tuple[_Tile, ...]]:
    return _CODED_TILES if shape.coded_x else _TILES


def _height(rows: int) -> int:
    return min(128, max(16, int(triton.next_power_of_2(rows))))


def _widest(shape: CodedShape) -> int:
    """Return the largest power of two that divides the groups, or what a tile of one scale a row may have."""
    return shape.group & -shape.group if shape.group < shape.depth else 1024


def _fitted(shape: CodedShape, block_m: int, tile: _Tile, per_unit: int) -> CodedConfig:
    """Return a tile within one group, with stages for so many programs on a multiprocessor, and its split of K."""
    block_n, deep, num_warps, swap = tile
    block_k = min(deep, _widest(shape))
    most = launching.shared_bytes() // per_unit - (_LEFT_BYTES if per_unit == 1 else 1024)
    stage = (block_m * shape.x_bytes + block_n * shape.bits // 8) * block_k
    if not shape.coded_x and block_m >= 64 and not swap:
        most -= block_n * block_k * _X_BYTES  # the matrix units read the unpacked weight from shared memory
    wanted = (5 if block_m <= _FEW_ROWS else 4) * (deep // block_k)
    stages = min(wanted, _MAX_STAGES, launching.num_stages(most, stage))
    split_k = _split(shape, block_m, block_n, block_k, per_unit * launching.num_multiprocessors())
    return CodedConfig(block_m, block_n, block_k, num_warps, stages, split_k, swap)


def _split(shape: CodedShape, block_m: int, block_n: int, block_k: int, slots: int) -> int:
    """Return the number of programs that share a tile's K: one that fills the slots evenly and adds few bytes to move.

    Partial sums are written and read once more, four bytes each, but stay in the L2 cache, which counts as twice as
    fast as memory.
    """
    tiles = triton.cdiv(shape.rows, block_m) * triton.cdiv(shape.columns, block_n)
    steps = triton.cdiv(shape.depth, block_k)

    def cost(split: int) -> float:
        rounds = tiles * split / slots
        shares = 4 * split * min(block_m, shape.rows) if split > 1 else 0
        uneven = math.ceil(rounds) / rounds if rounds < _DRIFTING else 1.0
        return (shape.bits * shape.depth / 8 + shares) * uneven

    return min(range(1, max(1, min(_MAX_SPLITS, steps // 2)) + 1), key=cost)
