"""Kernels of `core::grouped_mlp` for pairs of token and expert sorted by expert: matrix products of tiles, and sums.

Tiles are BLOCK_M pairs of one expert, its last one shorter; how many there are is data, so as many programs start as
there may be, and those without a tile end.

Of a prompt's experts many have few tiles, so that a good part of all rows lies in tiles that are not full. HALVES
computes a tile that is at most half full as one of half the rows, from the same loads of weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.activation import activate, gate_product
from core_cuda.ops.launching import start_next, wait_for_inputs


@triton.jit
def _dot(values, tile, acc, SWAP: tl.constexpr):
    return tl.dot(tile, tl.trans(values), acc) if SWAP else tl.dot(values, tl.trans(tile), acc)


@triton.jit
def _sums(
    x_tile, w_tile, second, K, stride_k, columns, num_columns, BLOCK_K: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, TWO: tl.constexpr, SWAP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return the product over K of the tiles at these pointers, and, if TWO, that of the weights `second` further."""
    steps = tl.arange(0, BLOCK_K)
    acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    other = tl.zeros((HEIGHT, WIDTH), tl.float32)
    inside = (columns < num_columns)[:, None]
    for k in range(0, K, BLOCK_K):
        # Masks that are not there cost nothing and leave plain copies.
        if EVEN_K and EVEN_N:
            values = tl.load(x_tile + k)
            acc = _dot(values, tl.load(w_tile + k * stride_k), acc, SWAP)
            if TWO:
                other = _dot(values, tl.load(w_tile + second + k * stride_k), other, SWAP)
        else:
            within = (k + steps < K)[None, :]
            mask = inside & within
            values = tl.load(x_tile + k, mask=within, other=0.0)
            acc = _dot(values, tl.load(w_tile + k * stride_k, mask=mask, other=0.0), acc, SWAP)
            if TWO:
                up = tl.load(w_tile + second + k * stride_k, mask=mask, other=0.0)
                other = _dot(values, up, other, SWAP)
    return acc, other


@triton.jit
def _compute_tile(
    x, weight, bias, out, order, begin, end, number, N, K, stride_x, stride_n, stride_k,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    ROWS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    MERGED: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Store the number-th BLOCK_N columns of the pairs from begin to end, at most BLOCK_M.

    weight, bias: the expert's own. MERGED: gates and ups are one product, whose columns alternate.
    """
    FIRST: tl.constexpr = KIND != ""
    PARTS: tl.constexpr = 2 if MERGED else 1
    TWO: tl.constexpr = GATED and not MERGED
    HEIGHT: tl.constexpr = PARTS * BLOCK_N if SWAP else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if SWAP else PARTS * BLOCK_N
    places = begin + tl.arange(0, BLOCK_M)
    inside = places < end
    # Rows past the end repeat the last one instead of being masked: plain copies can be pipelined.
    places = tl.minimum(places, end - 1).to(tl.int64)
    pairs = tl.load(order + places).to(tl.int64)
    sources = pairs // TOP_K if FIRST else places
    targets = places if FIRST else pairs
    columns = number * (PARTS * BLOCK_N) + tl.arange(0, PARTS * BLOCK_N)
    if ROWS and not EVEN_N:
        columns = tl.minimum(columns, PARTS * N - 1)  # as with rows of x; columns in memory would lose wide loads
    rows = columns // 2 + (columns % 2) * N if MERGED and not INTERLEAVED else columns
    steps = tl.arange(0, BLOCK_K)
    x_tile = x + sources[:, None] * stride_x + steps[None, :]
    w_tile = weight + rows[:, None] * stride_n + (steps * stride_k)[None, :]
    acc, other = _sums(
        x_tile, w_tile, N * stride_n, K, stride_k, columns, PARTS * N, BLOCK_K, HEIGHT, WIDTH, TWO, SWAP,
        EVEN_N or ROWS, EVEN_K,
    )  # fmt: skip
    if SWAP:
        acc, other = tl.trans(acc), tl.trans(other)
    if HAS_BIAS:
        within = columns < PARTS * N
        acc += tl.load(bias + rows, mask=within, other=0.0).to(tl.float32)[None, :]
        if TWO:
            other += tl.load(bias + rows + N, mask=within, other=0.0).to(tl.float32)[None, :]
    if MERGED:
        acc, other = tl.split(acc.reshape(BLOCK_M, BLOCK_N, 2))
    if GATED:
        acc = gate_product(acc, other, LIMIT, KIND, LIMIT > 0.0, UP_OFFSET)
    elif FIRST:
        acc = activate(acc, KIND)
    own = number * BLOCK_N + tl.arange(0, BLOCK_N)
    place = out + targets[:, None] * N + own[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=inside[:, None] & (own < N)[None, :])


@triton.jit
def product_kernel(
    x, weight, bias, out, order, tiles, N, K, stride_x, stride_e, stride_n, stride_k, stride_b,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    GROUP: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, MERGED: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one tile of pairs by their expert's weight; N columns come out.

    With an activation, KIND: from x (T, K) and weight (E, 2 * N, K) if GATED, else (E, N, K), to out (pairs, N) in the
    order of `order`. Without: from that order, x (pairs, K), and weight (E, N, K) to the pairs' own, out (pairs, N).
    """
    # The programs of GROUP tiles that take the same columns are neighbours, so that the L2 cache holds those columns:
    # otherwise experts with many columns would be read from memory anew for every few tiles.
    blocks = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * blocks) * GROUP
    within = tl.program_id(0) % (GROUP * blocks)
    size = tl.minimum(GROUP, tl.num_programs(0) // blocks - first) if GROUP > 1 else 1
    tile, number = first + within % size, within // size
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    if expert >= 0:
        begin, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        own = weight + expert * stride_e
        own_bias = bias + expert * stride_b if HAS_BIAS else bias
        if HALVES and end - begin <= BLOCK_M // 2:
            _compute_tile(
                x, own, own_bias, out, order, begin, end, number, N, K, stride_x, stride_n, stride_k,
                TOP_K, BLOCK_M // 2, BLOCK_N, BLOCK_K, SWAP, ROWS, EVEN_N, EVEN_K, HAS_BIAS, GATED, MERGED,
                INTERLEAVED, KIND, LIMIT, UP_OFFSET,
            )  # fmt: skip
        else:
            _compute_tile(
                x, own, own_bias, out, order, begin, end, number, N, K, stride_x, stride_n, stride_k,
                TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, ROWS, EVEN_N, EVEN_K, HAS_BIAS, GATED, MERGED,
                INTERLEAVED, KIND, LIMIT, UP_OFFSET,
            )  # fmt: skip


@triton.jit
def sum_kernel(
    results, weights, indices, out, num_experts, N,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token: out (T, N), the weighted sum of its experts' results (pairs, N), in their order."""
    token = (tl.program_id(0) // tl.cdiv(N, BLOCK)).to(tl.int64)
    columns = (tl.program_id(0) % tl.cdiv(N, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    pick = tl.arange(0, PICKS)
    pair = token * TOP_K + pick
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    expert = tl.load(indices + pair, mask=pick < TOP_K, other=-1)
    # Rows of pairs of no expert hold anything.
    used = (expert >= 0) & (expert < num_experts)
    share = tl.load(weights + pair, mask=used, other=0.0).to(tl.float32)
    inside = columns < N
    mask = used[:, None] & inside[None, :]
    rows = tl.load(results + (pair * N)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(rows * share[:, None], axis=0)
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=inside)
