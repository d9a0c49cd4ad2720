"""How attention over prompts is compiled and launched: the configuration of a shape, and those worth timing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import triton

from core_cuda.ops import launching
from core_cuda.tuned import winner

VALUE_PART = 256
"""Most features of a value that fit into a program's registers."""

_MIN_TILE = 16  # rows and columns of a product on the matrix units
_FEW_STAGES, _FEW_ROWS = 2, 64  # below which smaller tiles of keys are the lesser evil
_BARRIER_BYTES = 1024  # what waits for tiles, where matrix units read shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """The sizes by which a configuration is chosen, as in `core::attention`; element_bytes of query, key and value."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    element_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How the kernel is compiled and launched."""

    #: rows of a tile: `pack` heads of each of block_m / pack tokens
    block_m: int
    #: keys per iteration
    block_n: int
    pack: int
    num_warps: int
    num_stages: int
    #: load this step's keys and values by tensor descriptors where their layout and the GPU allow it
    tma: bool = True


def choose(shape: PrefillShape) -> PrefillConfig:
    """Return a configuration that fits the GPU's shared memory, by rules that a tuner's winners override."""
    return _fitted(_roomy(shape), shape)


def _roomy(shape: PrefillShape) -> PrefillConfig:
    """Return the configuration for a shape where shared memory is no limit, as at compute capability 9.0."""
    pack = min(triton.next_power_of_2(shape.num_heads // shape.num_kv_heads), 16)
    widest = max(shape.key_size, shape.value_size)
    if shape.element_bytes == 4:  # without tensor cores the registers are the limit
        return PrefillConfig(block_m=16, block_n=16, pack=pack, num_warps=4, num_stages=1, tma=False)
    if widest > 256:
        return PrefillConfig(block_m=64, block_n=32, pack=pack, num_warps=8, num_stages=2)
    if widest > 128:
        # Units that read registers leave too few of them for 128 rows of a result of 256 features.
        rows = 128 if launching.has_shared_operands() else 64
        return PrefillConfig(block_m=rows, block_n=32, pack=pack, num_warps=8, num_stages=3)
    if shape.num_tokens * shape.num_heads < 128 * launching.num_multiprocessors():
        return PrefillConfig(block_m=64, block_n=64, pack=pack, num_warps=4, num_stages=3)
    if widest > 64:
        return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=8, num_stages=4)
    return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=4, num_stages=3)


def _fitted(config: PrefillConfig, shape: PrefillShape) -> PrefillConfig:
    """Return a configuration with fewer stages and smaller tiles, as far as the GPU's shared memory asks for it."""
    while not _fits(config, shape):
        if config.num_stages > _FEW_STAGES:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_m > _FEW_ROWS:
            config = replace(config, block_m=config.block_m // 2)
        elif config.block_n > _MIN_TILE:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_m > max(_MIN_TILE, config.pack):
            config = replace(config, block_m=config.block_m // 2)
        else:
            break
    return config


def _fits(config: PrefillConfig, shape: PrefillShape) -> bool:
    """Return whether a program has room for its tiles: of keys and values, of queries, and of the weights of values."""
    width, part = (triton.next_power_of_2(size) for size in (shape.key_size, min(shape.value_size, VALUE_PART)))
    if launching.has_shared_operands():
        tiles, beside = config.num_stages, _BARRIER_BYTES  # queries in shared memory, weights in registers
    else:
        # A stage's tile is in registers when its turn comes; what is laid out anew passes through shared memory.
        tiles, beside = max(config.num_stages - 1, 1), config.block_m * config.block_n * shape.element_bytes
    taken = tiles * config.block_n * (width + part) + config.block_m * width
    return bool(taken * shape.element_bytes + beside <= launching.shared_bytes())


def measured(shape: PrefillShape) -> PrefillConfig | None:
    """Return the fastest configuration measured for this shape on this GPU, or None."""
    sizes = asdict(shape)
    del sizes["num_seqs"]  # the number of sequences hardly matters
    _, found = winner("prefill_attention", sizes, ranged=("num_tokens",))
    return PrefillConfig(**found) if found else None


def candidates(shape: PrefillShape) -> tuple[PrefillConfig, ...]:
    """Return the configurations worth timing for a shape, the chosen one first."""
    chosen = choose(shape)
    widest = max(shape.key_size, shape.value_size)
    if shape.element_bytes == 4:
        return (chosen,)
    if widest > 256:
        tiles = [(64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 1)]
    elif widest > 128:
        tiles = [(128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)]
    else:
        tiles = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3)]
        tiles += [(128, 64, 4, 3), (64, 128, 4, 3)] if widest <= 64 else []
    others = [
        PrefillConfig(block_m=m, block_n=n, pack=pack, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in tiles
        for pack in sorted({1, chosen.pack})
    ]
    others.append(replace(chosen, tma=False))
    return (chosen, *(other for other in others if other != chosen and _fits(other, shape)))
