"""Products with weights of codes: `x (M, K) @ weight (N, K).T`, the codes turned into numbers in registers.

One kernel for x in half precision times codes of 4 bits, int8 or fp8 (weight-only), and for int8 times int8. What a
thread loads of a tile of codes is what the matrix units want of it, so codes become numbers where they are. Sums of one
group of a scale are multiplied by that scale in fp32, so that numbers are integers, or those of fp8, and exact. K is
split over several programs where the tiles alone would leave multiprocessors idle, as in skinny.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import fetch, start_next, wait_for_inputs
from core_cuda.ops.linear.coded_configs import CodedConfig, CodedShape, default_config
from core_cuda.ops.packed import unpack_bytes
from core_cuda.ops.workspace import counters

_LINE = tl.constexpr(128)  # bytes of the L2 cache that are fetched together
_MAX_LINES = 8
_UNROLLED = tl.constexpr(64 * 64)
_TOGETHER = tl.constexpr(8)  # tiles of rows that use a tile of the weight at about the same time, in the L2 cache


@triton.jit
def _numbers(codes, zero, DTYPE: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return codes (N, C) as numbers (N, K) of DTYPE, less zero (N,); exact: they are integers to 255, or of fp8."""
    if BITS == 4:
        numbers = unpack_bytes(codes, DTYPE)
    elif codes.dtype == tl.float8e4nv:
        numbers = codes.to(tl.float16).to(tl.float32).to(DTYPE)  # an instruction from fp16 to bf16 takes longer
    else:
        numbers = codes.to(DTYPE)
    if HAS_ZERO:
        numbers = numbers - zero.to(DTYPE)[:, None]
    return numbers


@triton.jit
def _dot(values, numbers, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(numbers, tl.trans(values), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(values, tl.trans(numbers), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def _place(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tile of this program: neighbours share tiles of the weight, and `_TOGETHER` tiles of rows."""
    number = tl.program_id(0)
    high, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = number // (wide * _TOGETHER) * _TOGETHER
    height = tl.minimum(high - band, _TOGETHER)
    inner = number % (wide * _TOGETHER)
    return band + inner % height, inner // height


@triton.jit(do_not_specialize=["M", "splits"])  # compile one kernel for all numbers of rows and of shares
def coded_kernel(
    x, codes, scale, zeros, x_scale, bias, out, partial, arrived,
    M, N, K, C, stride_x, stride_w, stride_s, stride_z, x_step, share, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, X_SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile of the result over this program's share of K.

    C: bytes in a row of codes. GROUP: 0 for one scale a row. FETCH: lines of each row's share that are fetched early.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    HEIGHT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    tile_m, tile_n = _place(M, N, BLOCK_M, BLOCK_N)
    split = tl.program_id(1)
    begin = split * share
    # Rows and columns past the end repeat the last one instead of being masked: plain copies can be pipelined.
    columns = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    if FETCH and OVERLAP:
        lines = tl.minimum(begin // PER_BYTE + tl.arange(0, FETCH) * _LINE, C - 1)
        fetch(codes + columns[:, None] * stride_w + lines[None, :])
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    rows = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    x_tile = x + rows[:, None] * stride_x + tl.arange(0, BLOCK_K)[None, :]
    w_tile = codes + columns[:, None] * stride_w + tl.arange(0, BLOCK_K // PER_BYTE)[None, :]
    group_scale, group_zero = scale + columns * stride_s, zeros + columns * stride_z
    used = tl.load(group_scale + (begin // GROUP if GROUP else 0))
    zero = tl.load(group_zero) if HAS_ZERO else 0
    acc = tl.zeros((HEIGHT, WIDTH), SUM)
    for k in range(begin, tl.minimum(begin + share, K), BLOCK_K):
        if EVEN_K:
            values, w_codes = tl.load(x_tile + k), tl.load(w_tile + k // PER_BYTE)
        else:
            values = tl.load(x_tile + k, mask=(k + tl.arange(0, BLOCK_K) < K)[None, :], other=0.0)
            inside = k // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE) < C
            w_codes = tl.load(w_tile + k // PER_BYTE, mask=inside[None, :], other=0.0)
        if GROUP:
            # Loaded a step ahead: Triton loads ahead only what a product reads. Zero points are not: from one step to
            # the next they would take a layout that the numbers have to follow, through shared memory.
            next_scale = tl.load(group_scale + tl.minimum(k + BLOCK_K, K - BLOCK_K) // GROUP)
            if HAS_ZERO:
                zero = tl.load(group_zero + k // GROUP)
            numbers = _numbers(w_codes, zero, x.dtype.element_ty, BITS, HAS_ZERO)
            product = _dot(values, numbers, tl.zeros((HEIGHT, WIDTH), SUM), SWAP)
            acc += product * (used[:, None] if SWAP else used[None, :])
            used = next_scale
        else:
            acc = _dot(values, _numbers(w_codes, zero, x.dtype.element_ty, BITS, HAS_ZERO), acc, SWAP)

    is_last = True
    if SPLIT:
        number = tl.program_id(0)
        shares = partial + number.to(tl.int64) * (splits * HEIGHT * WIDTH)
        shares += tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        filled = tile_m * BLOCK_M + tl.arange(0, BLOCK_M) < M
        filled = filled[None, :] if SWAP else filled[:, None]
        tl.store(shares + split * (HEIGHT * WIDTH), acc, mask=filled)
        tl.debug_barrier()  # all threads must have written the share before the arrival is counted
        is_last = tl.atomic_add(arrived + number, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived + number, 0)  # reset for the next launch
            acc = tl.zeros((HEIGHT, WIDTH), SUM)
            # In a fixed order, for the same bits each time; several loads at once, where registers hold them.
            for each in tl.range(0, splits, loop_unroll_factor=4 if HEIGHT * WIDTH <= _UNROLLED else 1):
                acc += tl.load(shares + each * (HEIGHT * WIDTH), mask=filled, other=0.0, cache_modifier=".cg")
    if is_last:
        result = (tl.trans(acc) if SWAP else acc).to(tl.float32)
        if not GROUP:
            result = result * tl.load(group_scale)[None, :]
        if X_SCALED:
            result = result * tl.load(x_scale + rows * x_step)[:, None]
        if HAS_BIAS:
            result += tl.load(bias + columns).to(tl.float32)[None, :]
        all_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        all_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        place = out + all_rows.to(tl.int64)[:, None] * N + all_columns[None, :]
        inside = (all_rows < M)[:, None] & (all_columns < N)[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


def coded_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int = 8,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: CodedConfig | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias` (M, N), M from 1 on, of the dequantised weight (N, K); summed in fp32, rounded once.

    x (M, K), its rows in one run of memory each: bfloat16 or float16; or codes of int8, with x_scale (M,) or (1,) fp32
    and without groups or zero points, whose products are summed in int32. codes: (N, K) int8 or fp8, or words of 4-bit
    codes (N, ceil(K / 8)) int32. scale: (N, G), or (1, 1) for all, fp32; zero_point (N, G) int8. bias (N,). out_dtype
    defaults to x's, config to `default_config`. Groups have to be such that `coded_configs.why_no_tile` is None.
    """
    num_rows, depth = x.shape
    columns, groups = codes.shape[0], scale.shape[1]
    shape = CodedShape(num_rows, columns, depth, bits, depth // groups, coded_x=x_scale is not None)
    config = config or default_config(shape)
    codes, scale = (t if t.stride(1) == 1 else t.contiguous() for t in (codes, scale))
    codes = codes.view(torch.uint8) if bits == 4 else codes
    out = x.new_empty((num_rows, columns), dtype=out_dtype or x.dtype)
    # Any pointer where there is nothing: it is not read.
    zeros = out if zero_point is None else zero_point if zero_point.stride(1) == 1 else zero_point.contiguous()
    bias_or_any = out if bias is None else bias.contiguous()
    steps = triton.cdiv(depth, config.block_k)
    per_split = triton.cdiv(steps, config.split_k)
    splits = triton.cdiv(steps, per_split)  # no share is empty
    share = per_split * config.block_k
    lines = min(_MAX_LINES, triton.next_power_of_2(triton.cdiv(share * bits // 8, _LINE.value)))
    tiles = triton.cdiv(num_rows, config.block_m) * triton.cdiv(columns, config.block_n)
    partial = arrived = out
    if splits > 1:
        size = tiles * splits * config.block_m * config.block_n
        partial = torch.empty(size, dtype=torch.float32 if x_scale is None else torch.int32, device=x.device)
        arrived = counters(tiles, x.device)
    launching.launch(
        coded_kernel, (tiles, splits), x, codes, scale, zeros, out if x_scale is None else x_scale, bias_or_any, out,
        partial, arrived, num_rows, columns, depth, codes.shape[1], x.stride(0), codes.stride(0),
        scale.stride(0) if scale.shape[0] > 1 else 0, zeros.stride(0), int(x_scale is not None and x_scale.numel() > 1),
        share, splits,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BITS=bits,
        GROUP=shape.group if groups > 1 else 0, HAS_ZERO=zero_point is not None, X_SCALED=x_scale is not None,
        HAS_BIAS=bias is not None, SPLIT=splits > 1, SWAP=config.swap, EVEN_K=depth % config.block_k == 0,
        FETCH=lines if config.fetch else 0,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
