"""The kernel of `core::quantized_grouped_linear`: tiles of one expert's rows by its quantised weight.

Rows come sorted, and each program finds its tile from the experts' ends by itself: a prefix sum over the experts, no
launch before. Codes of one 8-bit dtype on both sides go to the matrix units as they are. Otherwise both become 16-bit
numbers in registers, which hold every code, and every code less its zero point, exactly. So scales multiply sums in
fp32, those of a group of inputs the sum over that group, and nothing is rounded before the end. Only where a step has
several groups do scales multiply numbers, which are rounded once more: sums over so few inputs would take longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.packed import unpack, widen


@triton.jit
def _tile_of(ends, number, num_rows, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's expert, which is num_experts for rows of none, and its rows from and to; none past the last."""
    each = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(ends + each, mask=each < num_experts, other=num_rows), num_rows)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each <= num_experts), other=0)
    begin = tl.where(each > num_experts, num_rows, tl.minimum(begin, num_rows))
    cut = tl.maximum(end - begin + BLOCK_M - 1, 0) // BLOCK_M
    expert = tl.sum((tl.cumsum(cut, axis=0) <= number).to(tl.int32), axis=0)
    own = each == expert
    first = tl.sum(tl.where(own, begin, 0), axis=0)
    first += (number - tl.sum(tl.where(each < expert, cut, 0), axis=0)) * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tl.sum(tl.where(own, end, 0), axis=0))
    return expert, first, last


@triton.jit
def _dot(values, tile, acc, SWAP: tl.constexpr):
    # The units of capability 9.0 sum products of fp8 in fewer bits than fp32 has: over this much of K at most.
    NARROW: tl.constexpr = min(values.shape[1], 128)
    if SWAP:
        acc = tl.dot(tile, tl.trans(values), acc, max_num_imprecise_acc=NARROW, out_dtype=acc.dtype)
    else:
        acc = tl.dot(values, tl.trans(tile), acc, max_num_imprecise_acc=NARROW, out_dtype=acc.dtype)
    return acc


@triton.jit
def _numbers(tile, zero, dtype: tl.constexpr):
    """Return values as they are; codes less zero, which broadcasts to them, in a dtype that holds them."""
    if tile.dtype == dtype:
        return tile
    elif tile.dtype == tl.int32:
        return unpack(tile, zero).to(dtype)
    elif tile.dtype == tl.int8:
        return widen(tile, zero).to(dtype)
    else:
        return tile.to(dtype)


@triton.jit
def _scaled(tile, scales, zeros, first, dtype: tl.constexpr, GROUPS: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return the numbers of a tile of so many groups in each row, the first of them this one, rounded to dtype."""
    places = first + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scales[:, None] + places).to(tl.float32)
    zero = tl.load(zeros[:, None] + places).to(tl.float32) if HAS_ZERO else tl.zeros_like(scale)
    grouped = tile.reshape(tile.shape[0], GROUPS, tile.shape[1] // GROUPS)
    numbers = _numbers(grouped, zero[:, :, None], tl.float32) * scale[:, :, None]
    return numbers.reshape(tile.shape[0], GROUPS * numbers.shape[2]).to(dtype)


@triton.jit
def _sums(
    x_tile, w_tile, x_zero, zeros, scales, K, group,
    BLOCK_K: tl.constexpr, PACKED: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr, GROUPS: tl.constexpr,
    X_ZERO: tl.constexpr, W_ZERO: tl.constexpr,
):  # fmt: skip
    """Return (BLOCK_N, BLOCK_M) if SWAP, else (BLOCK_M, BLOCK_N): the product over K of the tiles at these pointers.

    zeros, scales: pointers to the first group's, of each row of the weight. GROUPS: how many groups a step has; 1 where
    several steps may share one; 0 where a row has one scale, which is left out.
    """
    x_dtype: tl.constexpr = x_tile.dtype.element_ty
    AS_CODES: tl.constexpr = x_dtype == w_tile.dtype.element_ty and not X_ZERO and not W_ZERO
    # The dtypes of the operands and of the sums.
    wide: tl.constexpr = x_dtype if AS_CODES or x_dtype.primitive_bitwidth == 16 else tl.bfloat16
    sums: tl.constexpr = tl.int32 if AS_CODES and x_dtype == tl.int8 else tl.float32
    PER_STEP: tl.constexpr = BLOCK_K // 8 if PACKED else BLOCK_K
    rows: tl.constexpr = w_tile.shape[0] if SWAP else x_tile.shape[0]
    columns: tl.constexpr = x_tile.shape[0] if SWAP else w_tile.shape[0]
    steps, w_steps = tl.arange(0, BLOCK_K), tl.arange(0, PER_STEP)
    acc = tl.zeros((rows, columns), sums)
    total = tl.zeros((rows, columns), tl.float32)
    scale = tl.load(scales).to(tl.float32)
    zero = tl.load(zeros).to(tl.float32) if W_ZERO else tl.zeros_like(scale)
    for k in range(0, K, BLOCK_K):
        at = k // BLOCK_K * PER_STEP
        if EVEN_K:
            values, tile = tl.load(x_tile + k), tl.load(w_tile + at)
        else:
            values = tl.load(x_tile + k, mask=(k + steps < K)[None, :], other=0.0)
            width = tl.cdiv(K, 8) if PACKED else K
            tile = tl.load(w_tile + at, mask=(at + w_steps < width)[None, :], other=0.0)
        values = _numbers(values, x_zero[:, None], wide)
        if X_ZERO and not EVEN_K:
            values = tl.where((k + steps < K)[None, :], values, 0.0).to(wide)
        if GROUPS > 1:
            tile = _scaled(tile, scales, zeros, k // BLOCK_K * GROUPS, wide, GROUPS, W_ZERO)
            acc = _dot(values, tile, acc, SWAP)
        elif GROUPS == 1:
            # What the next step needs is on its way while this one computes.
            following = tl.minimum(k + BLOCK_K, K - 1) // group
            next_scale = tl.load(scales + following).to(tl.float32)
            next_zero = tl.load(zeros + following).to(tl.float32) if W_ZERO else zero
            part = _dot(values, _numbers(tile, zero[:, None], wide), acc, SWAP).to(tl.float32)
            total += part * (scale[:, None] if SWAP else scale[None, :])
            scale, zero = next_scale, next_zero
        else:
            acc = _dot(values, _numbers(tile, zero[:, None], wide), acc, SWAP)
    return total if GROUPS == 1 else acc.to(tl.float32)


@triton.jit
def quantized_product_kernel(
    x, x_scale, x_zero, ends, weight, w_scale, w_zero, out, num_rows, N, K, num_experts, num_groups, stride_x, stride_e,
    stride_n, x_step,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr,
    SWAP: tl.constexpr, EVEN_K: tl.constexpr, GROUPS: tl.constexpr, X_SCALED: tl.constexpr, X_ZERO: tl.constexpr,
    W_ZERO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one tile of rows: out (R, N) of x (R, K), ends (E,) and weight (E, N, K), packed or not.

    x_scale and x_zero: a number per row, x_step 1, or one in all, x_step 0; w_scale and w_zero (E, N, num_groups).
    EXPERTS is more than num_experts; GROUPS is as for `_sums`.
    """
    number = tl.program_id(0) % tl.cdiv(N, BLOCK_N)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    expert, begin, end = _tile_of(
        ends, tl.program_id(0) // tl.cdiv(N, BLOCK_N), num_rows, num_experts, EXPERTS, BLOCK_M
    )
    if begin < end:
        places = begin + tl.arange(0, BLOCK_M)
        # Rows and columns past the end repeat the last one instead of being masked: plain copies can be pipelined.
        rows = tl.minimum(places, end - 1).to(tl.int64)
        own = number * BLOCK_N + tl.arange(0, BLOCK_N)
        columns = tl.minimum(own, N - 1)
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if expert < num_experts:
            lanes = tl.arange(0, BLOCK_K // 8 if PACKED else BLOCK_K)
            x_tile = x + rows[:, None] * stride_x + tl.arange(0, BLOCK_K)[None, :]
            w_tile = weight + expert.to(tl.int64) * stride_e + columns.to(tl.int64)[:, None] * stride_n + lanes[None, :]
            regions = (expert.to(tl.int64) * N + columns) * num_groups
            zero = tl.zeros((BLOCK_M,), tl.float32)
            row_factor, factor = 1.0, 1.0
            if X_ZERO:
                zero = tl.load(x_zero + rows * x_step).to(tl.float32)
            if X_SCALED:
                row_factor = tl.load(x_scale + rows * x_step).to(tl.float32)[:, None]
            if GROUPS == 0:
                factor = tl.load(w_scale + regions).to(tl.float32)[None, :]
            result = _sums(
                x_tile, w_tile, zero, w_zero + regions, w_scale + regions, K, K // num_groups,
                BLOCK_K, PACKED, SWAP, EVEN_K, GROUPS, X_ZERO, W_ZERO,
            )  # fmt: skip
            result = (tl.trans(result) if SWAP else result) * factor * row_factor
        place = out + rows[:, None] * N + own[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=(places < end)[:, None] & (own < N)[None, :])
