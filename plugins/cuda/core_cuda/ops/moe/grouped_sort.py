"""Pairs of a token and an expert sorted by expert and cut into tiles, for `core::grouped_mlp` of many tokens.

A counting sort whose programs need no word from each other. Few pairs take one launch, in which every expert's program
counts all of them. That is as much work as experts times pairs; many pairs take two launches, in which blocks of pairs
are counted, and then each block finds its own pairs' places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs

_FEW = 2**20
"""Experts times pairs up to which one launch is faster than two."""
_BLOCK = 512  # pairs that a program places: each is compared with those before it
_LOADED = 8192
"""Counts that a program loads at a time."""


def sort_pairs(indices: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return order (n,) and tiles (at most so many, 3) of the n pairs of contiguous indices (T, k).

    order: the pairs by expert, those of one in their order; the pairs of no expert, not in [0, E), are not there, and
    as many places at its end hold anything. tiles: up to block_m pairs of an expert each: that expert, and where in
    `order` they begin and end; -1 for an expert where there are fewer tiles.
    """
    pairs, experts = indices.numel(), max(32, triton.next_power_of_2(num_experts))
    # Every expert that has pairs may leave one tile unfilled.
    num_tiles = (pairs + min(num_experts, pairs) * (block_m - 1)) // block_m
    order = torch.empty(pairs, dtype=torch.int32, device=indices.device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=indices.device)
    if num_experts * pairs <= _FEW:
        block = min(8192, max(128, triton.next_power_of_2(pairs)))
        launching.launch(
            sort_kernel, (num_experts,), indices, order, tiles, pairs, num_experts, num_tiles,
            BLOCK_M=block_m, EXPERTS=experts, BLOCK=block, num_warps=min(max(block // 512, 4), 16),
        )  # fmt: skip
        return order, tiles
    blocks = triton.cdiv(pairs, _BLOCK)
    counts = torch.empty((blocks, experts), dtype=torch.int32, device=indices.device)
    launching.launch(
        count_kernel, (blocks,), indices, counts, pairs, num_experts, EXPERTS=experts, BLOCK=_BLOCK, num_warps=4
    )
    launching.launch(
        place_kernel, (blocks,), indices, counts, order, tiles, pairs, num_experts, num_tiles,
        BLOCK_M=block_m, EXPERTS=experts, BLOCK=_BLOCK, ROWS=max(1, _LOADED // experts), num_warps=8,
    )  # fmt: skip
    return order, tiles


@triton.jit
def sort_kernel(
    indices, order, tiles, num_pairs, num_experts, num_tiles,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One expert. order: pairs by expert; tiles (num_tiles, 3): expert or -1, and where in `order` it begins and ends.

    Pairs of no expert are not in `order`.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    bins = tl.arange(0, EXPERTS)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for at in range(0, num_pairs, BLOCK):
        chosen = tl.load(indices + at + lanes, mask=at + lanes < num_pairs, other=-1)
        real = (chosen >= 0) & (chosen < num_experts)
        counts += tl.histogram(tl.where(real, chosen, 0).to(tl.int32), EXPERTS, mask=real)
    cut = (counts + BLOCK_M - 1) // BLOCK_M
    begin = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    first = tl.sum(tl.where(bins < expert, cut, 0), axis=0)
    end = begin + tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    own = tl.cdiv(end - begin, BLOCK_M)
    for number in range(own):
        entry = tiles + 3 * (first + number)
        tl.store(entry, expert)
        tl.store(entry + 1, begin + number * BLOCK_M)
        tl.store(entry + 2, tl.minimum(begin + (number + 1) * BLOCK_M, end))
    if expert == num_experts - 1:
        for at in range(first + own, num_tiles, BLOCK):
            tl.store(tiles + 3 * (at + lanes), -1, mask=at + lanes < num_tiles)
    for at in range(0, num_pairs, BLOCK):
        mine = tl.load(indices + at + lanes, mask=at + lanes < num_pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order + begin + rank - 1, at + lanes, mask=mine)
        begin += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def count_kernel(
    indices, counts, num_pairs, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """One block of pairs: in counts (blocks, EXPERTS), how many of them each expert has."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    chosen = tl.load(indices + at, mask=at < num_pairs, other=-1)
    real = (chosen >= 0) & (chosen < num_experts)
    own = tl.histogram(tl.where(real, chosen, 0).to(tl.int32), EXPERTS, mask=real)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), own)


@triton.jit
def _experts(indices, at, num_pairs, num_experts):
    """Return the experts of pairs, int32; -1 for pairs of none and behind the last pair."""
    chosen = tl.load(indices + at, mask=at < num_pairs, other=-1)
    return tl.where((chosen >= 0) & (chosen < num_experts), chosen, -1).to(tl.int32)


@triton.jit
def _cut(tiles, counts, begins, num_tiles, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Write this program's share of the tiles: of every expert each so many-th one."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, EXPERTS)
    own = (counts + BLOCK_M - 1) // BLOCK_M
    firsts = tl.cumsum(own, axis=0) - own
    for number in range(program, tl.max(own, axis=0), programs):
        entry = tiles + 3 * (firsts + number)
        begin = begins + number * BLOCK_M
        inside = number < own
        tl.store(entry, bins, mask=inside)
        tl.store(entry + 1, begin, mask=inside)
        tl.store(entry + 2, tl.minimum(begin + BLOCK_M, begins + counts), mask=inside)
    for at in range(tl.sum(own, axis=0) + program * EXPERTS, num_tiles, programs * EXPERTS):
        tl.store(tiles + 3 * (at + bins), -1, mask=at + bins < num_tiles)


@triton.jit
def place_kernel(
    indices, counts, order, tiles, num_pairs, num_experts, num_tiles, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of pairs, of which `count_kernel` has counted each: what `sort_kernel` writes, and a share of tiles."""
    CHUNK: tl.constexpr = 32  # pairs before one that it is compared with at a time, in registers
    block, blocks = tl.program_id(0), tl.num_programs(0)
    bins, rows = tl.arange(0, EXPERTS), tl.arange(0, ROWS)
    lanes, earlier = tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for at in range(0, blocks, ROWS):
        row = (at + rows)[:, None]
        own = tl.load(counts + row * EXPERTS + bins[None, :], mask=row < blocks, other=0)
        total += tl.sum(own, axis=0)
        before += tl.sum(tl.where(row < block, own, 0), axis=0)
    begins = tl.cumsum(total, axis=0) - total
    _cut(tiles, total, begins, num_tiles, BLOCK_M, EXPERTS)
    pairs = block * BLOCK + lanes
    expert = _experts(indices, pairs, num_pairs, num_experts)
    rank = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, BLOCK, CHUNK):
        other = _experts(indices, block * BLOCK + at + earlier, num_pairs, num_experts)
        alike = (other[:, None] == expert[None, :]) & ((at + earlier)[:, None] < lanes[None, :])
        rank += tl.sum(alike.to(tl.int32), axis=0)
    place = tl.gather(begins + before, tl.maximum(expert, 0), axis=0) + rank
    tl.store(order + place, pairs, mask=expert >= 0)
