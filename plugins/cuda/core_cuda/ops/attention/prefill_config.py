"""How attention over prompts is compiled and launched: the configuration of a shape, and those worth timing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import triton

from core_cuda.ops import launching
from core_cuda.tuned import winner


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
    #: load this step's keys and values by tensor descriptors where their layout allows it
    tma: bool = True


def choose(shape: PrefillShape) -> PrefillConfig:
    """Return the configuration for a shape, by rules that a tuner's winners override."""
    pack = min(triton.next_power_of_2(shape.num_heads // shape.num_kv_heads), 16)
    widest = max(shape.key_size, shape.value_size)
    if shape.element_bytes == 4:  # without tensor cores the registers are the limit
        return PrefillConfig(block_m=16, block_n=16, pack=pack, num_warps=4, num_stages=1, tma=False)
    if widest > 256:
        return PrefillConfig(block_m=64, block_n=32, pack=pack, num_warps=8, num_stages=2)
    if widest > 128:
        return PrefillConfig(block_m=128, block_n=32, pack=pack, num_warps=8, num_stages=3)
    if shape.num_tokens * shape.num_heads < 128 * launching.num_multiprocessors():
        return PrefillConfig(block_m=64, block_n=64, pack=pack, num_warps=4, num_stages=3)
    if widest > 64:
        return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=8, num_stages=4)
    return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=4, num_stages=3)


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
    return (chosen, *(other for other in others if other != chosen))
