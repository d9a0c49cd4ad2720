"""Kernels of space_chunks.py: the steps and decays of chunks, and states along sequences.

Between its kernels lie, in fp32, `fading` (chunks, HEADS, 3, CHUNK): of each row its step, the logarithm of the decay
from the begin of its tile to behind it, and its step decayed from behind it to the end of its tile; in a tile 0 behind
the last row of a sequence. And `before` (chunks, HEADS, FEATURES, STATE): the state before each chunk.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.chunks import chunk_at, place_of
from core_cuda.ops.recurrent.parts import product
from core_cuda.ops.recurrent.states import exponential, rows_of, slot_of, softplus, within


@triton.jit
def _steps(
    dt, bias, bounded, first, each, real, dt_row, SOFTPLUS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return the steps of rows first + each (1, rows), 0 for those that are not real. dt, bias: (heads, 1)."""
    step = tl.load(dt + first * dt_row + each * dt_row, mask=real, other=0.0).to(tl.float32) + bias
    if SOFTPLUS:
        step = softplus(step)
    return tl.where(real, within(step, bounded, first + each, real, LEAST, MOST), 0.0)


@triton.jit(do_not_specialize=["num_sequences"])  # one kernel for all numbers of sequences
def steps_kernel(
    dt, A, dt_bias, bounded, query_starts, fading, dt_row, dt_head, A_head, bias_head, num_sequences,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Steps and decays of one chunk of BLOCK heads."""
    blocks: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    place = (tl.program_id(0) // blocks).to(tl.int64)
    heads = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK))[:, None]
    each = tl.arange(0, TILE)[None, :]
    mask = heads < HEADS
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = chunk_at(query_starts, place, num_sequences, CHUNK)
    if begin >= last:
        return
    rates = tl.load(A + heads * A_head, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + heads * bias_head, mask=mask, other=0.0).to(tl.float32) if dt_bias is not None else 0.0
    dt += heads * dt_head
    fading += place * (HEADS * 3 * CHUNK) + heads * (3 * CHUNK) + each
    for tile in tl.static_range(CHUNK // TILE):
        first = begin + tile * TILE
        count = (last - first).to(tl.int32)
        real = mask & (each < count)
        step = _steps(dt, bias, bounded, first, each, real, dt_row, SOFTPLUS, LEAST, MOST)
        # Sums from the last row backwards: what is far from the end has decayed, and may be rounded by more.
        behind = mask & (each + 1 < tl.minimum(count, TILE))
        after = _steps(dt, bias, bounded, first + 1, each, behind, dt_row, SOFTPLUS, LEAST, MOST)
        here = fading + tile * TILE
        tl.store(here, step, mask=mask)
        tl.store(here + CHUNK, tl.cumsum(step * rates, 1), mask=mask)
        tl.store(here + 2 * CHUNK, step * exponential(tl.cumsum(after * rates, 1, reverse=True)), mask=mask)


@triton.jit
def passing_kernel(
    x, B, states, slots, kept, query_starts, fading, before, x_row, x_head, B_row, B_group, state_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_STATE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK features of a head with BLOCK_STATE numbers each, along one sequence; each chunk finds them in before."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    widths: tl.constexpr = (STATE + BLOCK_STATE - 1) // BLOCK_STATE
    tiles: tl.constexpr = CHUNK // TILE
    part, head = tl.program_id(0) % (blocks * widths), tl.program_id(0) // (blocks * widths) % HEADS
    sequence = tl.program_id(0) // (blocks * widths * HEADS)
    features = (part // widths) * BLOCK + tl.arange(0, BLOCK)
    numbers = (part % widths) * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
    each, shown, own = tl.arange(0, TILE), features < FEATURES, numbers < STATE
    mask = shown[:, None] & own[None, :]
    offsets = head * (FEATURES * STATE) + features[:, None] * STATE + numbers[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = rows_of(query_starts, sequence)
    place = place_of(query_starts, sequence, CHUNK).to(tl.int64)
    state = tl.load(states + slot_of(slots, sequence) * state_slot + offsets, mask=mask, other=0.0).to(tl.float32)
    x += head * x_head + (features[:, None] + each[None, :] * x_row)
    B += (head // GROUP) * B_group + (each[:, None] * B_row + numbers[None, :])
    fading += (place * HEADS + head) * (3 * CHUNK)
    before += place * (HEADS * FEATURES * STATE) + offsets
    coming = tl.load(fading + CHUNK + TILE - 1, mask=begin < last, other=0.0)
    for first in range(begin, last, TILE):
        tile, passed = (first - begin) // TILE, coming
        if tile % tiles == 0:
            tl.store(before + tile // tiles * (HEADS * FEATURES * STATE), state, mask=mask)
        real = each < (last - first).to(tl.int32)
        weights = tl.load(fading + (tile // tiles * (HEADS * 3 * CHUNK) + tile % tiles * TILE) + 2 * CHUNK + each)
        token = tl.load(x + first * x_row, mask=shown[:, None] & real[None, :], other=0.0)
        keys = tl.load(B + first * B_row, mask=real[:, None] & own[None, :], other=0.0).to(OPERAND)
        tile += 1
        after = fading + (tile // tiles * (HEADS * 3 * CHUNK) + tile % tiles * TILE)
        coming = tl.load(after + CHUNK + TILE - 1, mask=first + TILE < last, other=0.0)
        new = product(token.to(tl.float32) * weights[None, :], keys, 3, True)
        # Behind `where` the product is a sum of its own: the compiler would start it with the state, by whose size each
        # of its steps would round.
        state = state * exponential(passed) + tl.where(mask, new, 0.0)
    tl.store(states + slot_of(kept, sequence) * state_slot + offsets, state, mask=mask)
