"""Matrix products with few rows: `x (M, K) @ weight (N, K).T`, whose time is that of reading the weight.

Two kernels here, and for compute capability 9 another (hopper.py). `_row_kernel` serves one row: sums of products on
the ordinary units, no tile is wasted. `_tile_kernel` serves up to 128 rows on the matrix units; its tiles are tall in
N, and K is split over several programs where the tiles alone would leave multiprocessors idle (split-K as in Osama et
al., Stream-K, arXiv 2301.03598, with equal shares; the last program of a tile to arrive adds up the shares). Each can
end in the gate of a gated MLP, for which a program computes the same columns of gate and up.

A weight is never written while a model serves, so its first part is read, or fetched into the L2 cache, before the
kernel waits for the one before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.activation import Gate, gate_product
from core_cuda.ops.launching import Early, start_next, wait_for_inputs
from core_cuda.ops.linear.hopper import hopper_linear, takes
from core_cuda.ops.linear.skinny_configs import SkinnyConfig, default_config
from core_cuda.ops.workspace import counters

READ_EARLY = {
    "_row_kernel": {
        "weight": Early(
            "`lift_linear`, `fuse_gated_linear` and `widen_routers` take weights that are constants of the graph and "
            "that it does not write. Codes may be computed, and no configuration for them chooses this kernel"
        )
    }
}
_FETCHED = 1024  # bytes of each row that `_tile_kernel` fetches
_ALIGNED = 16  # elements between rows, so that what is fetched begins at a multiple of 16 bytes in every dtype


@triton.jit
def _finish(acc, up, KIND: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    if KIND != "":
        acc = gate_product(acc, up, LIMIT, KIND, LIMIT > 0.0, UP_OFFSET)
    return acc


@triton.jit
def _fetch(places):
    """Fetch 1 KiB of the weight from each of these places on into the L2 cache, and wait for nothing.

    The hardware takes addresses that are multiples of 16 bytes, and memory that exists.
    """
    tl.inline_asm_elementwise(
        "{ .reg .u64 g; cvta.to.global.u64 g, $1; cp.async.bulk.prefetch.L2.global [g], 1024; mov.u32 $0, 0; }",
        "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _scaled(acc, x_scale, w_scale, bias, x_place, columns, w_step, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    if SCALED:
        acc = acc * tl.load(x_scale + x_place) * tl.load(w_scale + columns * w_step)
    if HAS_BIAS:
        acc += tl.load(bias + columns).to(tl.float32)
    return acc


@triton.jit
def _row_kernel(
    x, weight, bias, x_scale, w_scale, out, N, K, stride_w, first, second, w_step,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of x. N: columns of the result; first, second: where gate and up begin in the weight's rows.

    What is read before the wait is one tile. Fetching all rows of the weight into the L2 cache then made the kernel 13
    to 45 % slower on an H200, at each of ten sizes.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    inside = columns < N
    rows = columns.to(tl.int64)[:, None] * stride_w + steps[None, :]
    gates = weight + first * stride_w + rows
    ups = weight + second * stride_w + rows
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    mask = inside[:, None] & (steps < K)[None, :]
    tile = tl.load(gates, mask=mask, other=0.0, eviction_policy="evict_first")
    if KIND != "":
        up_tile = tl.load(ups, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    for k in range(0, K, BLOCK_K):
        values = tl.load(x + k + steps, mask=k + steps < K, other=0.0).to(tl.float32)[None, :]
        acc += tile.to(tl.float32) * values
        mask = inside[:, None] & (k + BLOCK_K + steps < K)[None, :]
        tile = tl.load(gates + k + BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")
        if KIND != "":
            up_acc += up_tile.to(tl.float32) * values
            up_tile = tl.load(ups + k + BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")
    total = tl.sum(acc, axis=1)
    up = tl.sum(up_acc, axis=1)
    last = tl.minimum(columns, N - 1)
    total = _scaled(total, x_scale, w_scale, bias, 0, first + last, w_step, SCALED, HAS_BIAS)
    if KIND != "":
        up = _scaled(up, x_scale, w_scale, bias, 0, second + last, w_step, SCALED, HAS_BIAS)
    result = _finish(total, up, KIND, LIMIT, UP_OFFSET)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dot(values, tile, acc, SWAP: tl.constexpr):
    # The units of capability 9.0 sum products of fp8 in fewer bits than fp32 has: over this much of K at most.
    NARROW: tl.constexpr = min(tile.shape[1], 128)
    if SWAP:
        acc = tl.dot(tile, tl.trans(values), acc, input_precision="ieee", max_num_imprecise_acc=NARROW)
    else:
        acc = tl.dot(values, tl.trans(tile), acc, input_precision="ieee", max_num_imprecise_acc=NARROW)
    return acc


@triton.jit(do_not_specialize=["M", "splits"])  # compile one kernel for all numbers of rows and of shares
def _tile_kernel(
    x, weight, bias, x_scale, w_scale, out, partial, arrived,
    M, N, K, stride_x, stride_w, stride_out, first, second, share, splits, x_step, w_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All rows of x times BLOCK_N columns (of gate and of up), over this program's share of K."""
    GATED: tl.constexpr = KIND != ""
    number, split = tl.program_id(0), tl.program_id(1)
    begin = split * share
    # Rows and columns past the end repeat the last one instead of being masked: plain copies can be pipelined.
    columns = tl.minimum(number * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    if FETCH and OVERLAP:
        # The last share may be shorter than what is fetched, which must not go past the weight's end.
        fetched = tl.minimum(begin, K - 8192 // weight.dtype.element_ty.primitive_bitwidth)
        lines = columns.to(tl.int64) * stride_w + fetched
        _fetch(weight + first * stride_w + lines)
        if GATED:
            _fetch(weight + second * stride_w + lines)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    rows = tl.minimum(tl.arange(0, BLOCK_M), M - 1)
    steps = tl.arange(0, BLOCK_K)
    x_tile = x + rows.to(tl.int64)[:, None] * stride_x + steps[None, :]
    w_tile = weight + (first + columns).to(tl.int64)[:, None] * stride_w + steps[None, :]
    up_tile = weight + (second + columns).to(tl.int64)[:, None] * stride_w + steps[None, :]
    HEIGHT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    up = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for k in range(begin, tl.minimum(begin + share, K), BLOCK_K):
        if EVEN_K:
            values = tl.load(x_tile + k)
            acc = _dot(values, tl.load(w_tile + k, eviction_policy="evict_first"), acc, SWAP)
            if GATED:
                up = _dot(values, tl.load(up_tile + k, eviction_policy="evict_first"), up, SWAP)
        else:
            mask = (k + steps < K)[None, :]
            values = tl.load(x_tile + k, mask=mask, other=0.0)
            acc = _dot(values, tl.load(w_tile + k, mask=mask, other=0.0), acc, SWAP)
            if GATED:
                up = _dot(values, tl.load(up_tile + k, mask=mask, other=0.0), up, SWAP)

    SIZE: tl.constexpr = HEIGHT * WIDTH
    PARTS: tl.constexpr = 2 if GATED else 1
    is_last = True
    if SPLIT:
        inner = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        shares = partial + number.to(tl.int64) * (splits * PARTS * SIZE) + inner
        tl.store(shares + split * (PARTS * SIZE), acc)
        if GATED:
            tl.store(shares + split * (PARTS * SIZE) + SIZE, up)
        tl.debug_barrier()  # all threads must have written the share before the arrival is counted
        is_last = tl.atomic_add(arrived + number, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived + number, 0)  # reset for the next launch
            acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
            up = tl.zeros((HEIGHT, WIDTH), tl.float32)
            for each in range(splits):  # in a fixed order, for the same bits each time
                acc += tl.load(shares + each * (PARTS * SIZE), cache_modifier=".cg")
                if GATED:
                    up += tl.load(shares + each * (PARTS * SIZE) + SIZE, cache_modifier=".cg")
    if is_last:
        all_rows, all_columns = tl.arange(0, BLOCK_M), number * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_part = tl.trans(acc) if SWAP else acc
        up_part = tl.trans(up) if SWAP else up
        own, theirs = rows[:, None], columns[None, :]
        gate_part = _scaled(gate_part, x_scale, w_scale, bias, own * x_step, first + theirs, w_step, SCALED, HAS_BIAS)
        if GATED:
            up_part = _scaled(up_part, x_scale, w_scale, bias, own * x_step, second + theirs, w_step, SCALED, HAS_BIAS)
        result = _finish(gate_part, up_part, KIND, LIMIT, UP_OFFSET)
        place = out + all_rows.to(tl.int64)[:, None] * stride_out + all_columns[None, :]
        inside = (all_rows < M)[:, None] & (all_columns < N)[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gate: Gate | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    early: bool = False,
) -> Tensor:
    """Return `x @ weight.T + bias`, gated if asked: (M, K) and (N, K) -> (M, N), or (M, N / 2) behind a gate.

    M is 1 to `MAX_ROWS`; x and weight have one dtype, their rows lie in one run of memory each; bias (N,). scales: of
    x (M,) and of weight (N,), fp32, for codes of fp8. out_dtype defaults to x's. config defaults to `default_config`.
    early: whether codes may be read before earlier kernels have ended, as numbers always are. Accumulates in fp32 and
    rounds once, at the end.
    """
    num_rows, depth = x.shape
    columns = weight.shape[0] // 2 if gate else weight.shape[0]
    config = config or default_config(num_rows, columns, depth, gated=gate is not None, bits=8 * x.itemsize)
    out = x.new_empty((num_rows, columns), dtype=out_dtype or x.dtype)
    gated = gate or Gate("")
    first, second = (0, columns) if gated.gate_first else (columns, 0)
    if config.kernel == "hopper":
        if takes(x, weight):
            hopper_linear(x, weight, bias, out, gate, scales, config, early=early or scales is None)
            return out
        config = default_config(num_rows, columns, depth, gated=gate is not None, bits=8 * x.itemsize, portable=True)
    epilogue = {"KIND": gated.kind, "LIMIT": gated.limit, "UP_OFFSET": gated.up_offset, "HAS_BIAS": bias is not None}
    tiles = triton.cdiv(columns, config.block_n)
    bias = out if bias is None else bias.contiguous()  # any pointer if there is none: it is not read
    epilogue["SCALED"] = scales is not None
    x_scale, w_scale = scales or (out, out)
    steps_of = (int(x_scale.numel() > 1), int(w_scale.numel() > 1))
    if config.kernel == "row":
        launching.launch(
            _row_kernel, (tiles,), x, weight, bias, x_scale, w_scale, out, columns, depth, weight.stride(0), first,
            second, steps_of[1], BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps, **epilogue,
        )  # fmt: skip
        return out
    block_m = max(16, triton.next_power_of_2(num_rows))
    steps = triton.cdiv(depth, config.block_k)
    per_split = triton.cdiv(steps, config.split_k)
    splits = triton.cdiv(steps, per_split)  # no share is empty
    shares = (tiles, splits, (2 if gate else 1) * block_m * config.block_n)
    partial = torch.empty(shares if splits > 1 else (0,), dtype=torch.float32, device=x.device)
    arrived = counters(tiles, x.device) if splits > 1 else partial
    even = depth % config.block_k == 0
    fetch = config.fetch and even and per_split * config.block_k * weight.itemsize >= _FETCHED
    fetch = fetch and weight.stride(0) % _ALIGNED == 0 and weight.data_ptr() % 16 == 0
    launching.launch(
        _tile_kernel, (tiles, splits), x, weight, bias, x_scale, w_scale, out, partial, arrived,
        num_rows, columns, depth, x.stride(0), weight.stride(0), columns, first, second,
        per_split * config.block_k, splits, *steps_of,
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=splits > 1, SWAP=config.swap,
        EVEN_K=even, FETCH=fetch, num_warps=config.num_warps, num_stages=config.num_stages,
        **epilogue,
    )  # fmt: skip
    return out
