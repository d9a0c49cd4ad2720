"""How `core::quantized_grouped_linear` is divided among programs: the default for any size, and what a tuner tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton

from core_cuda.ops import launching

_SHARED_BYTES = 110 * 1024  # where two programs are to fit a multiprocessor
_LEFT_BYTES = 7 * 1024  # what a program that has a multiprocessor for itself leaves of its shared memory
_MOST_STAGES = 6
_STEP = 128  # inputs
_ALONE_ROWS = 128
"""Rows of a tile from which a program has a multiprocessor for itself."""
LEAST_K = 16
"""Inputs that the matrix units sum over at a time, of 16-bit numbers; of 8-bit codes twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedShape:
    """The sizes that determine a configuration."""

    #: of x, all experts' together
    rows: int
    experts: int
    columns: int
    depth: int
    #: inputs of an expert's row that share one scale: depth, where the row has one
    group: int
    #: of a code of the weight
    w_bits: int
    #: of an element of x
    x_bits: int

    @property
    def as_codes(self) -> bool:
        """Return whether x holds codes too."""
        return self.x_bits == 8

    @property
    def grouped(self) -> bool:
        """Return whether a row has several scales."""
        return self.group < self.depth

    def groups(self, block_k: int) -> int:
        """Return how many groups a step over so many inputs has: 0 for none, 1 also where it is part of one."""
        return max(1, block_k // self.group) if self.grouped else 0

    def fits(self, block_k: int) -> bool:
        """Return whether steps over so many inputs are parts of groups, or whole groups of a weight alone."""
        if not self.grouped or self.group % block_k == 0:
            return True
        return block_k % self.group == self.depth % block_k == 0 and self.x_bits > 8


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """How the product is computed."""

    #: rows of a tile
    block_m: int
    #: columns of a tile
    block_n: int
    #: inputs that are summed over at a time
    block_k: int
    num_warps: int = 4
    #: tiles being loaded into shared memory
    num_stages: int = 1
    #: whether the weight is the left operand of the matrix units, which take no fewer than 64 rows there, and can read
    #: numbers made of codes from registers
    swap: bool = True


def default_config(shape: QuantizedShape) -> QuantizedConfig:
    """Return a configuration from the sizes alone, for sizes that were not measured."""
    # Most experts' rows in one tile, so that their weights are read once.
    most = 3 * shape.rows // (2 * shape.experts)
    return _tile(shape, min(max(triton.next_power_of_2(most), 16), 128))


def candidates(shape: QuantizedShape) -> Iterator[QuantizedConfig]:
    """Yield the configurations worth measuring for these sizes, the default first."""
    yield from dict.fromkeys((default_config(shape), *_all(shape)))


def _tile(shape: QuantizedShape, block_m: int) -> QuantizedConfig:
    depth = _block_k(shape, _STEP)
    if block_m >= _ALONE_ROWS:
        # Units that read registers leave fewer of them for sums, and so do codes whose groups have sums of their own.
        columns = 128 if launching.has_shared_operands() and not (shape.as_codes and shape.grouped) else 64
        return _fitted(shape, QuantizedConfig(block_m, columns, depth, 8, 4, not shape.as_codes))
    swap = block_m <= 32 or not shape.as_codes
    return _fitted(shape, QuantizedConfig(block_m, 64, depth, 4, _MOST_STAGES, swap))


def _block_k(shape: QuantizedShape, most: int) -> int:
    """Return the most inputs, up to so many, that a step may sum over: a power of two."""
    least = LEAST_K * (2 if shape.as_codes else 1)
    size: int = max(least, min(most, triton.next_power_of_2(shape.depth)))
    while not shape.fits(size):
        size //= 2
    return size


def _fitted(shape: QuantizedShape, config: QuantizedConfig) -> QuantizedConfig:
    """Return the configuration with as many stages, up to its own, as fit into shared memory."""
    two = min(_SHARED_BYTES, launching.shared_bytes_of_two())
    most = launching.shared_bytes() - _LEFT_BYTES if config.block_m >= _ALONE_ROWS else two
    stage = config.block_k * (config.block_m * shape.x_bits + config.block_n * shape.w_bits) // 8
    # Numbers made of codes pass through shared memory on their way to the units.
    made = 0 if shape.as_codes else 2 * config.block_n * config.block_k
    stages = launching.num_stages(most - made, stage)
    return replace(config, num_stages=max(1, min(config.num_stages, stages)))


def _all(shape: QuantizedShape) -> Iterator[QuantizedConfig]:
    for block_m in (16, 32, 64, 128):
        # Skip tiles that most experts would leave nearly empty, or that would cut most experts' rows into many tiles.
        if block_m > 16 and not shape.experts * block_m // 8 <= shape.rows <= shape.experts * block_m * 64:
            continue
        for columns, depth, warps in ((64, 128, 4), (64, 256, 4), (32, 256, 4), (128, 128, 4), (128, 128, 8)):
            for swap in (True, False):
                if columns < 64 and swap:
                    continue
                config = QuantizedConfig(block_m, columns, _block_k(shape, depth), warps, 8, swap)
                yield _fitted(shape, config)
                yield _fitted(shape, replace(config, num_stages=4))
