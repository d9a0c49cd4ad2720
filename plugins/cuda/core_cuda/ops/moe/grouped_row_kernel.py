"""Kernels of `core::grouped_mlp` for few tokens: a pair of token and expert at a time, as reading weights is the work.

Nothing is sorted. Programs that need the same part of the weights, should two tokens have chosen one expert, are
neighbours: memory hands it out once, and the L2 cache again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.activation import activate, gate_product
from core_cuda.ops.launching import Early, start_next, wait_for_inputs

READ_EARLY = {
    "row_down_kernel": {
        "indices": Early("`row_up_kernel` takes the same ones, after its wait", after="row_up_kernel"),
        "weight": Early("a parameter of the model; what computed it, if anything did, `row_up_kernel` has waited for"),
    }
}
_FOLD = tl.constexpr(8)  # elements of 16 bytes, which one thread loads of a run of memory


@triton.jit
def _folded(products, FOLD: tl.constexpr):
    """Return the sums of each FOLD neighbours in the last dimension, which lie in one thread: fewer registers."""
    if FOLD == 1:
        return products
    elif len(products.shape) == 2:
        return tl.sum(products.reshape(products.shape[0], products.shape[1] // FOLD, FOLD), axis=2)
    else:
        split = products.reshape(products.shape[0], products.shape[1], products.shape[2] // FOLD, FOLD)
        return tl.sum(split, axis=3)


@triton.jit
def row_up_kernel(
    x, indices, weight, bias, out, num_pairs, num_experts, N, K, stride_x, stride_e, stride_n, stride_k, stride_b,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N activated columns of one pair: out (num_pairs, N) of x (T, K) and weight (E, 2 * N, K) if GATED, else
    (E, N, K).

    ROWS: the weight's rows are one run of memory each, and BLOCK_K is a multiple of 8; else its columns.
    """
    FOLD: tl.constexpr = _FOLD if ROWS else 1
    pair = tl.program_id(0) % num_pairs
    first = (tl.program_id(0) // num_pairs) * BLOCK_N
    HEIGHT: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    lanes, steps = tl.arange(0, HEIGHT), tl.arange(0, BLOCK_K)
    # Gates and ups are one tile of rows, in the weight's own order. Masks compare what is contiguous, for wide loads.
    columns = first + lanes % BLOCK_N
    rows = 2 * first + lanes if INTERLEAVED else columns + (lanes // BLOCK_N) * N
    inside = rows < 2 * N if INTERLEAVED else columns < N
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    expert = tl.load(indices + pair).to(tl.int64)
    if (expert >= 0) & (expert < num_experts):
        own = weight + expert * stride_e + rows[:, None] * stride_n + (steps * stride_k)[None, :]
        row = x + (pair // TOP_K).to(tl.int64) * stride_x + steps
        tile = tl.load(own, mask=inside[:, None] & (steps < K)[None, :], other=0.0)
        acc = tl.zeros((HEIGHT, BLOCK_K // FOLD), tl.float32)
        for k in range(0, K, BLOCK_K):
            mask = inside[:, None] & (k + BLOCK_K + steps < K)[None, :]
            next_tile = tl.load(own + (k + BLOCK_K) * stride_k, mask=mask, other=0.0)
            values = tl.load(row + k, mask=k + steps < K, other=0.0).to(tl.float32)[None, :]
            acc += _folded(tile.to(tl.float32) * values, FOLD)
            tile = next_tile
        total = tl.sum(acc, axis=1)
        if HAS_BIAS:
            total += tl.load(bias + expert * stride_b + rows, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            parts = total.reshape(BLOCK_N, 2) if INTERLEAVED else tl.trans(total.reshape(2, BLOCK_N))
            gate, up = tl.split(parts)
            result = gate_product(gate, up, LIMIT, KIND, LIMIT > 0.0, UP_OFFSET)
        else:
            result = activate(total, KIND)
        own_columns = first + tl.arange(0, BLOCK_N)
        place = out + pair.to(tl.int64) * N + own_columns
        tl.store(place, result.to(out.dtype.element_ty), mask=own_columns < N)


@triton.jit
def row_down_kernel(
    hidden, weights, indices, weight, bias, out, num_tokens, num_experts, N, K, stride_e, stride_n, stride_k, stride_b,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one token: out (T, N), weighted sums of hidden (pairs, K) by weight (E, N, K)."""
    FOLD: tl.constexpr = _FOLD if ROWS else 1
    token = tl.program_id(0) % num_tokens
    columns = (tl.program_id(0) // num_tokens) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    pick = tl.arange(0, PICKS)
    pair = token.to(tl.int64) * TOP_K + pick
    # Read before the wait: `row_up_kernel`, which comes before, has waited for the indices before it let this one
    # start. Past the L1 cache, which may hold those of an earlier step.
    expert = tl.load(indices + pair, mask=pick < TOP_K, other=-1, cache_modifier=".cg").to(tl.int64)
    used = (expert >= 0) & (expert < num_experts)
    expert = tl.where(used, expert, 0)
    inside = columns < N
    rows = weight + (expert * stride_e)[:, None, None] + (columns * stride_n)[None, :, None]
    rows += (steps * stride_k)[None, None, :]
    present = used[:, None, None] & inside[None, :, None]
    tile = tl.load(rows, mask=present & (steps < K)[None, None, :], other=0.0)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    sources = hidden + (pair * K)[:, None, None] + steps[None, None, :]
    acc = tl.zeros((PICKS, BLOCK_N, BLOCK_K // FOLD), tl.float32)
    for k in range(0, K, BLOCK_K):
        mask = present & (k + BLOCK_K + steps < K)[None, None, :]
        next_tile = tl.load(rows + (k + BLOCK_K) * stride_k, mask=mask, other=0.0)
        mask = used[:, None, None] & (k + steps < K)[None, None, :]
        values = tl.load(sources + k, mask=mask, other=0.0).to(tl.float32)
        acc += _folded(tile.to(tl.float32) * values, FOLD)
        tile = next_tile
    total = tl.sum(acc, axis=2)
    if HAS_BIAS:
        own_bias = bias + (expert * stride_b)[:, None] + columns[None, :]
        total += tl.load(own_bias, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
    share = tl.load(weights + pair, mask=used, other=0.0).to(tl.float32)
    result = tl.sum(total * share[:, None], axis=0)
    tl.store(out + token.to(tl.int64) * N + columns, result.to(out.dtype.element_ty), mask=inside)
