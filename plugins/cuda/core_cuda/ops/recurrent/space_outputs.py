"""The last kernel of space_chunks.py: the results of chunks, from their rows and the states before them."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.chunks import chunk_at, decays_between
from core_cuda.ops.recurrent.parts import product
from core_cuda.ops.recurrent.states import exponential


@triton.jit
def _rows(x, row, each, real, columns, own, x_row):
    """Return rows from one on, each with these columns, 0 for those that are not real."""
    places = each[:, None] * x_row + columns[None, :]
    return tl.load(x + row * x_row + places, mask=real[:, None] & own[None, :], other=0.0)


@triton.jit
def _times(
    C, queries, each, real, C_row, right, others, shown, right_row, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return C of rows times other rows of STATE numbers, which lie at right, fp32.

    queries: C, loaded, where PARTS is 1. Else both go by blocks of numbers: registers hold no more of wider operands.
    """
    if PARTS == 1:
        numbers = tl.arange(0, BLOCK_STATE)
        keys = _rows(right, 0, others, shown, numbers, numbers < STATE, right_row)
        return tl.dot(queries, tl.trans(keys))
    else:
        result = tl.zeros((each.shape[0], others.shape[0]), tl.float32)
        for start in tl.static_range(0, STATE, BLOCK_STATE):
            numbers = start + tl.arange(0, BLOCK_STATE)
            left = _rows(C, 0, each, real, numbers, numbers < STATE, C_row).to(OPERAND)
            keys = _rows(right, 0, others, shown, numbers, numbers < STATE, right_row)
            result += product(left, tl.trans(keys if keys.dtype == tl.float32 else keys.to(OPERAND)), PARTS, True)
        return result


@triton.jit
def _decays(step, faded, rate, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """Return by what a state decays from each row of a tile (second dimension) to each later one or itself (first)."""
    if tl.float32 == OPERAND:
        return decays_between(step * rate, TILE)
    else:  # differences of sums round by more, though by less than results of half precision do
        powers = faded * 1.4426950408889634
        rows = tl.arange(0, TILE)
        return tl.where(rows[:, None] >= rows[None, :], tl.exp2(powers[:, None] - powers[None, :]), 0.0)


@triton.jit
def _results(
    x, A, C, D, fading, before, out, queries, scores, earlier, first, each, real, features, x_row, x_head, A_head,
    C_row, D_head, low, high, tile, HEADS: tl.constexpr, FEATURES: tl.constexpr, STATE: tl.constexpr,
    BLOCK_STATE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PARTS: tl.constexpr,
    EARLIER: tl.constexpr,
):  # fmt: skip
    """Store the results of the rows of one tile, for heads from low to high.

    queries: C of these rows. scores: C times B, of rows of the tile; earlier: of those and rows of the tile before, if
    EARLIER. fading, before: of the chunk.
    """
    shown = features < FEATURES
    for head in range(low, high):
        here = fading + head * (3 * CHUNK) + tile * TILE
        step, faded = tl.load(here + each), tl.load(here + CHUNK + each)
        rate = tl.load(A + head * A_head).to(tl.float32)
        skip = tl.load(D + head * D_head).to(tl.float32) if D is not None else 0.0
        passed = tl.load(here + CHUNK - 1) if EARLIER else 0.0
        known = before + head * (FEATURES * STATE)
        result = _times(
            C, queries, each, real, C_row, known, features, shown, STATE, STATE, BLOCK_STATE, OPERAND, PARTS
        )
        if EARLIER:
            weights = earlier * tl.load(here + 2 * CHUNK - TILE + each)[None, :]
            other = _rows(x + head * x_head, first - TILE, each, each < TILE, features, shown, x_row).to(OPERAND)
            result = result * exponential(passed) + product(weights, other, PARTS, True)
        weights = scores * _decays(step, faded, rate, TILE, OPERAND) * step[None, :]
        token = _rows(x + head * x_head, first, each, real, features, shown, x_row).to(OPERAND)
        result = result * exponential(faded)[:, None] + product(weights, token, PARTS, True)
        result += token.to(tl.float32) * skip
        offsets = each[:, None] * (HEADS * FEATURES) + features[None, :]
        tl.store(out + (first * HEADS + head) * FEATURES + offsets, result, mask=real[:, None] & shown[None, :])


@triton.jit
def _clear(
    out, first, query_starts, features, low, high, rows, num_sequences, HEADS: tl.constexpr, FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Clear results of those of TILE rows that are padding, behind the last sequence."""
    end = tl.load(query_starts + num_sequences).to(tl.int64)
    at = first + tl.arange(0, TILE)
    if first + TILE > end:
        mask = ((at >= end) & (at < rows))[:, None] & (features < FEATURES)[None, :]
        for head in range(low, high):
            offsets = (at[:, None] * HEADS + head) * FEATURES + features[None, :]
            tl.store(out + offsets, tl.zeros((TILE, features.shape[0]), tl.float32), mask=mask)


@triton.jit(do_not_specialize=["num_sequences", "rows"])
def outputs_kernel(
    x, A, B, C, D, query_starts, fading, before, out, x_row, x_head, A_head, B_row, B_group, C_row, C_group, D_head,
    rows, num_sequences, HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, STATE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_STATE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SHARE: tl.constexpr,
    OPERAND: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The results of TILE rows of one chunk, for BLOCK features of SHARE heads of a group, head by head.

    So C and B are loaded, and multiplied, once for these heads.
    """
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    programs: tl.constexpr = blocks * shares * (HEADS // GROUP)
    tiles: tl.constexpr = CHUNK // TILE
    tl.static_assert(tiles <= 2)  # a tile knows of one before it
    group, share = tl.program_id(0) // (blocks * shares) % (HEADS // GROUP), tl.program_id(0) // blocks % shares
    tile = tl.program_id(0) // programs % tiles
    place = (tl.program_id(0) // (programs * tiles)).to(tl.int64)
    features, each = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TILE)
    low = group * GROUP + share * SHARE
    high = tl.minimum(low + SHARE, (group + 1) * GROUP)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    own = place * CHUNK + tile * TILE  # of all rows; those of the chunk come below
    _clear(out, own, query_starts, features, low, high, rows, num_sequences, HEADS, FEATURES, TILE)
    begin, last = chunk_at(query_starts, place, num_sequences, CHUNK)
    first = begin + tile * TILE
    if first >= last:
        return
    real, numbers = each < (last - first).to(tl.int32), tl.arange(0, BLOCK_STATE)
    B += group * B_group + first * B_row
    C += group * C_group + first * C_row
    queries = _rows(C, 0, each, real, numbers, numbers < STATE, C_row) if PARTS == 1 else None
    scores = _times(C, queries, each, real, C_row, B, each, real, B_row, STATE, BLOCK_STATE, OPERAND, PARTS)
    fading += place * (HEADS * 3 * CHUNK)
    before += place * (HEADS * FEATURES * STATE)
    if tile == 0:
        _results(
            x, A, C, D, fading, before, out, queries, scores, scores, first, each, real, features, x_row, x_head,
            A_head, C_row, D_head, low, high, tile, HEADS, FEATURES, STATE, BLOCK_STATE, TILE, CHUNK, OPERAND, PARTS,
            False,
        )  # fmt: skip
    else:
        B -= TILE * B_row
        earlier = _times(C, queries, each, real, C_row, B, each, each < TILE, B_row, STATE, BLOCK_STATE, OPERAND, PARTS)
        _results(
            x, A, C, D, fading, before, out, queries, scores, earlier, first, each, real, features, x_row, x_head,
            A_head, C_row, D_head, low, high, tile, HEADS, FEATURES, STATE, BLOCK_STATE, TILE, CHUNK, OPERAND, PARTS,
            True,
        )  # fmt: skip
