"""How attention of few new tokens is compiled and launched: the configuration of a shape, and those worth timing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import triton

from core_cuda.ops import launching
from core_cuda.ops.attention.decode_plan import UNITS_OF_NEW
from core_cuda.tuned import winner

MIN_TILE = 16
"""Rows, columns and depth of a product on the matrix units, at least."""

_MAX_TILE = 128
_SCHEDULES = ((4, 3), (4, 4), (4, 5), (8, 4), (2, 4))  # num_warps, num_stages
_FEW_STAGES = 3  # with fewer, less than two tiles are being loaded while one is used
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MORE_PROGRAMS = 3  # where parts are small beside tiles, so that joining more of them costs little
_SMALL_PART = 6  # times that a tile is as large
_LEFT_BYTES = 35 * 1024  # of a program's shared memory, what candidates leave beside the tiles that are being loaded
_LARGE_RESULT = 16_384  # fp32 values of a result that 4 warps cannot hold in registers
_SMALL_RESULT = 4096  # fp32 values of a result that 2 warps hold in half of their registers
_WIDE_HEAD = 256  # features up to which 4 warps hold a tile's queries, each of them all, beside the rest in registers
_FP32_BYTES = 4
_TALL = 64  # rows from which matrix units that read shared memory take the products
# Bytes for the keys of a tile: at compute capability 9.0, with its values, and three tiles loading, four programs fit a
# multiprocessor. So up to twice as many programs as the plan wants run at the same time: none waits for another to end,
# and that they are no multiple of the multiprocessors costs little, since memory serves all of them alike.
_TILE_BYTES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """The sizes that determine a configuration."""

    num_seqs: int
    num_kv_heads: int
    #: query heads of a key/value head times new tokens of a sequence
    num_rows: int
    head_size: int
    value_size: int
    #: the most positions that a sequence can hold, or its window
    num_positions: int
    #: bytes of a number in the cache, or of the query where that is fp32
    itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and launched."""

    #: positions of a tile
    block_n: int
    #: programs of a key/value head beside one for each sequence, for which sequences are cut (decode_plan.py)
    helpers: int
    num_warps: int = 4
    num_stages: int = 4
    #: tiles of a share that are fetched while the kernel before still runs, a power of two or 0
    fetch: int = 1


def choose(shape: DecodeShape) -> DecodeConfig:
    """Return a configuration: tiles of a fixed number of bytes, and helpers as if they were to do all of the work."""
    wide = max(shape.head_size, shape.value_size)
    fitting = _TILE_BYTES // (triton.next_power_of_2(wide) * shape.itemsize)
    block_n = min(max(fitting, MIN_TILE), _MAX_TILE)
    # Matrix units round fp32, so products of fp32 run on the other units. Such products need many registers, and so
    # does a large result. Warps of a program wait for each other several times a tile: the fewer, the shorter.
    result = max(shape.num_rows, MIN_TILE) * triton.next_power_of_2(wide)
    if shape.itemsize > 2 or result >= _LARGE_RESULT:
        num_warps, num_stages = 8, 2
    elif shape.head_size > _WIDE_HEAD:
        num_warps, num_stages = 8, 4
    else:
        num_warps, num_stages = (2 if result <= _SMALL_RESULT and shape.num_rows < _TALL else 4), 4
    fitted = _fitted(DecodeConfig(block_n=block_n, helpers=0, num_warps=num_warps, num_stages=num_stages), shape)
    programs = _MORE_PROGRAMS if join_ratio(shape, fitted) >= _SMALL_PART else _PROGRAMS_PER_MULTIPROCESSOR
    wanted = programs * launching.num_multiprocessors() // shape.num_kv_heads
    return replace(fitted, helpers=_limited(wanted, shape, fitted.block_n))


def _fitted(config: DecodeConfig, shape: DecodeShape) -> DecodeConfig:
    """Return a configuration with fewer stages and smaller tiles, as far as the GPU's shared memory asks for it.

    Two programs' tiles that are being loaded fit a multiprocessor, if that leaves any.
    """
    while _loading(config, shape) > launching.shared_bytes_of_two() or not _fits(config, shape):
        if config.num_stages > (1 if config.block_n == MIN_TILE else _FEW_STAGES):
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > MIN_TILE:
            config = replace(config, block_n=config.block_n // 2)
        else:
            break  # `why_no_room` refuses it
    return config


def why_no_room(shape: DecodeShape) -> str | None:
    """Return why no configuration fits into the current GPU's shared memory, or None."""
    least = _shared_bytes(DecodeConfig(block_n=MIN_TILE, helpers=0, num_stages=1), shape)
    if least <= launching.shared_bytes():
        return None
    return (
        f"a program for {shape.num_rows} rows of {shape.head_size} features needs {least} bytes of shared memory, "
        f"and this GPU has {launching.shared_bytes()}"
    )


def measured(shape: DecodeShape) -> DecodeConfig | None:
    """Return the fastest configuration measured on this GPU for such a shape, or None."""
    _, found = winner("decode_attention", asdict(shape), ranged=("num_seqs",), near=("num_positions",))
    return DecodeConfig(**found) if found else None


def candidates(shape: DecodeShape) -> Iterator[DecodeConfig]:
    """Yield the configurations worth a measurement for this shape, each once, the chosen one first."""
    chosen = choose(shape)
    seen = {chosen}
    yield chosen
    for block_n in (chosen.block_n, chosen.block_n // 2, chosen.block_n * 2):
        variants: list[dict[str, Any]] = [{"fetch": fetch} for fetch in (0, 2, 4)]
        variants += [{"helpers": n} for n in _around(chosen.helpers)]
        variants += [{"num_warps": warps, "num_stages": stages} for warps, stages in _SCHEDULES]
        for changes in variants:
            config = replace(chosen, block_n=block_n, **changes)
            config = replace(config, helpers=_limited(config.helpers, shape, block_n))
            if config not in seen and _worthwhile(config, shape):
                seen.add(config)
                yield config


def _worthwhile(config: DecodeConfig, shape: DecodeShape) -> bool:
    most = launching.shared_bytes() - _LEFT_BYTES
    return MIN_TILE <= config.block_n <= _MAX_TILE and _loading(config, shape) <= most and _fits(config, shape)


def _fits(config: DecodeConfig, shape: DecodeShape) -> bool:
    return _shared_bytes(config, shape) <= launching.shared_bytes()


def _shared_bytes(config: DecodeConfig, shape: DecodeShape) -> int:
    """Return the shared memory that a program takes: tiles of keys and values, its queries and their weights."""
    rows = max(int(triton.next_power_of_2(shape.num_rows)), MIN_TILE)
    # Units that read shared memory need the tile there that they are at, not only those being loaded.
    used = launching.has_shared_operands() and rows >= _TALL and shape.itemsize <= 2
    tiles = max(config.num_stages - 1 + used, 1)
    operands = rows * (int(triton.next_power_of_2(shape.head_size)) + config.block_n) * max(shape.itemsize, 2)
    return tiles * config.block_n * _position_bytes(shape) + operands


def _loading(config: DecodeConfig, shape: DecodeShape) -> int:
    """Return the bytes of the tiles that are being loaded while one is used."""
    return config.block_n * (config.num_stages - 1) * _position_bytes(shape)


def _position_bytes(shape: DecodeShape) -> int:
    return int(triton.next_power_of_2(shape.head_size) + triton.next_power_of_2(shape.value_size)) * shape.itemsize


def _around(helpers: int) -> tuple[int, ...]:
    return helpers, helpers // 2, helpers * 2, helpers * 4, 0


def _units(shape: DecodeShape, block_n: int) -> int:
    """Return the most units of a sequence in the plan."""
    return -(-shape.num_positions // block_n) + int(UNITS_OF_NEW.value)


def _limited(helpers: int, shape: DecodeShape, block_n: int) -> int:
    """Return the number of helpers, without those that no sequences of this size have work for."""
    return min(helpers, shape.num_seqs * (_units(shape, block_n) - 1))


def join_ratio(shape: DecodeShape, config: DecodeConfig) -> float:
    """Return the bytes of a tile of keys and values over those of a program's partial result."""
    tile = config.block_n * (shape.head_size + shape.value_size) * shape.itemsize
    return tile / (shape.num_rows * (shape.value_size + 2) * _FP32_BYTES)


def most_shares(shape: DecodeShape, config: DecodeConfig) -> int:
    """Return the most shares that the plan cuts a sequence into."""
    joined = math.isqrt(math.ceil(_units(shape, config.block_n) * join_ratio(shape, config))) + 1
    return max(min(config.helpers + 1, joined), 1)
