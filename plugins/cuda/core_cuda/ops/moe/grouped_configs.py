"""How `core::grouped_mlp` is divided among programs: the default for any size, and what a tuner tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton

from core_cuda.ops import launching

_SHARED_BYTES = 110 * 1024  # where two programs are to fit a multiprocessor
_LEFT_BYTES = 7 * 1024  # what a program that has a multiprocessor for itself leaves of its shared memory
_FEW_PAIRS = 8
_MAX_ROW_TOP_K = 32
_ALIKE_TOKENS = 64
"""For which the tiles are chosen that serve any number of tokens."""
_GROUP = 8
"""Tiles of many pairs that take the same columns side by side: with as many columns, about what runs at a time."""
_PRODUCT_ELEMENTS = 8192
"""Elements of down that a program of the row kernels takes at a time: 64 to each of 128 threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedShape:
    """The sizes that determine a configuration: T tokens, top_k experts of each, E experts, D hidden and I inner
    size."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    #: whether the product with gate_up is of gate and up, else of up alone
    gated: bool = True
    #: whether gate_up lies in memory by columns (E, in, out), whatever the call says
    up_columns: bool = False
    #: whether down does
    down_columns: bool = False

    @property
    def pairs(self) -> int:
        """Return how many pairs of a token and an expert there are."""
        return self.tokens * self.top_k


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of a program."""

    #: columns of the product
    block_n: int
    #: elements summed over at a time
    block_k: int
    num_warps: int = 4
    #: tiles being loaded into shared memory
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """How the experts' products are computed."""

    #: "tile", pairs sorted by expert; or "row", a pair at a time, which reads neither block_m nor the tiles' stages
    kernel: str
    #: of the product with gate_up; block_n counts columns that come out, for which a gate needs twice as many
    up: Tile
    #: of the product with down
    down: Tile
    #: pairs of a tile
    block_m: int = 1
    #: columns that a program adds up for a token, where pairs are sorted; 0 by their number
    width: int = 0
    #: tiles whose programs of the same columns are neighbours, in the product with gate_up
    group: int = 1
    #: whether tiles that are at most half full are computed as half ones
    halves: bool = False
    #: whether gate and up, of weights by rows, are one product of alternate columns, as interleaved ones are anyway
    merged: bool = False

    @property
    def swap(self) -> bool:
        """Return whether weights are the left operand of the matrix units, which take no fewer than 64 rows there."""
        return self.block_m <= 32


def default_config(shape: GroupedShape) -> GroupedConfig:
    """Return a configuration from the sizes alone, for sizes that were not measured.

    A pair at a time, weights are read from memory once for the pairs that run side by side, but cross the L2 cache for
    every pair: that pays while most experts have one pair at most, and needs no sorting.
    """
    if shape.pairs <= max(shape.experts // 2, _FEW_PAIRS) and shape.top_k <= _MAX_ROW_TOP_K:
        return _row(shape)
    # Most experts' pairs in one tile, so that their weights are read once.
    most = 3 * shape.pairs // (2 * shape.experts)
    return _tile(shape, min(max(triton.next_power_of_2(most), 16), 128))


def alike_config(shape: GroupedShape) -> GroupedConfig:
    """Return a configuration that is the same for every number of tokens, so that each token's sums have one order."""
    return replace(_tile(replace(shape, tokens=_ALIKE_TOKENS), 64), width=256)


def candidates(shape: GroupedShape) -> Iterator[GroupedConfig]:
    """Yield the configurations worth measuring for these sizes, the default first."""
    yield from dict.fromkeys((default_config(shape), *_all(shape)))


def _row(shape: GroupedShape) -> GroupedConfig:
    units, picks = launching.num_multiprocessors(), triton.next_power_of_2(shape.top_k)
    parts = 1 if shape.gated else 2  # as many rows of weights to a program, with a gate or without
    if shape.up_columns:
        up = Tile(32 * parts, 64)
    else:
        block_n = 4 if shape.pairs * shape.inner >= 4 * 4 * units else 2
        up = Tile(block_n * parts, min(1024, max(32, triton.next_power_of_2(shape.hidden))))
    if shape.down_columns:
        # Memory is read in units of at least 32 bytes.
        down = Tile(16, max(1, _PRODUCT_ELEMENTS // (16 * picks)))
    else:
        block_k = min(256, max(32, triton.next_power_of_2(shape.inner)))
        down = Tile(max(1, min(8, _PRODUCT_ELEMENTS // (block_k * picks))), block_k)
    return GroupedConfig("row", up, down)


def _tile(shape: GroupedShape, block_m: int) -> GroupedConfig:
    if block_m <= 64:
        stages = 6 if block_m <= 32 else 4
        up = Tile(64, 64, 4, stages) if shape.gated else _single(shape, block_m, shape.inner, stages)
        return _fitted(shape, GroupedConfig("tile", up, _single(shape, block_m, shape.hidden, stages), block_m))
    # Units that read registers leave fewer of them for sums.
    columns = 128 if launching.has_shared_operands() else 64
    down = Tile(2 * columns, 64, 8, 4)
    up = Tile(columns, 64, 8, 4) if shape.gated else down
    config = GroupedConfig("tile", up, down, block_m, group=_GROUP, halves=True, merged=True)
    return _fitted(shape, config, alone=True)


def _single(shape: GroupedShape, block_m: int, columns: int, num_stages: int) -> Tile:
    """Return the tile of a product of one matrix, which has so many columns."""
    # Few experts' tiles, cut wide, would leave the last round of programs nearly empty.
    tiles = max(min(shape.experts, shape.pairs), shape.pairs // block_m)
    many = tiles * columns >= 128 * 4 * launching.num_multiprocessors()
    return Tile(128 if many else 64, 64, 4, num_stages)


def _fitted(shape: GroupedShape, config: GroupedConfig, *, alone: bool = False) -> GroupedConfig:
    """Return the configuration with as many stages, up to its own, as fit into shared memory.

    alone: whether a program has that of a multiprocessor for itself.
    """
    two = min(_SHARED_BYTES, launching.shared_bytes_of_two())
    most = launching.shared_bytes() - _LEFT_BYTES if alone else two

    def fit(tile: Tile, matrices: int) -> Tile:
        stage = 2 * (config.block_m + matrices * tile.block_n) * tile.block_k
        return replace(tile, num_stages=max(1, min(tile.num_stages, launching.num_stages(most, stage))))

    return replace(config, up=fit(config.up, 2 if shape.gated else 1), down=fit(config.down, 1))


def _all(shape: GroupedShape) -> Iterator[GroupedConfig]:
    if shape.pairs <= 2 * max(shape.experts, _FEW_PAIRS) and shape.top_k <= _MAX_ROW_TOP_K:
        yield from _rows(_row(shape))
    for block_m in (16, 32, 64, 128):
        # Skip tiles that most experts would leave nearly empty, or that would cut most experts' pairs into many tiles.
        if block_m > 16 and not shape.experts * block_m // 8 <= shape.pairs <= shape.experts * block_m * 64:
            continue
        config = _tile(shape, block_m)
        yield config
        wide = block_m == 128
        pairs = (Tile(32, 128, 4, 4), Tile(64, 128, 4, 3), Tile(128, 64, 8 if wide else 4, 3), Tile(64, 64, 8, 4))
        singles = (Tile(64, 128, 4, 4), Tile(64, 64, 4, 8), Tile(128, 128, 4, 3), Tile(128, 64, 8, 4))
        for up in pairs if shape.gated else singles:
            yield _fitted(shape, replace(config, up=up), alone=True)
        for down in singles:
            yield _fitted(shape, replace(config, down=down), alone=True)


def _rows(base: GroupedConfig) -> Iterator[GroupedConfig]:
    yield base
    for block_n, block_k, warps in ((2, 2048, 4), (2, 1024, 4), (4, 512, 4), (8, 512, 4), (4, 512, 2), (8, 1024, 8)):
        yield replace(base, up=Tile(block_n, min(block_k, 2 * base.up.block_k), warps))
    for factor, deeper, warps in ((1, 1, 2), (1, 1, 8), (2, 1, 4), (2, 1, 8), (1, 2, 4), (1, 2, 8)):
        yield replace(base, down=Tile(base.down.block_n * factor, base.down.block_k * deeper, warps))
