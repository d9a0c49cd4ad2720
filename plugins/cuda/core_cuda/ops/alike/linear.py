"""`core::linear` with each row's sums in one order, however many rows there are.

A result is a sum over K in shares, each begun from zero and summed by one instruction of the matrix units after the
other; the shares are then added in their order. The shares' number and size depend on the weight's shape alone. Who
computes them does not matter: with few rows each share has a program of its own, and the last of a tile to arrive adds
them up; with many, one program computes them in turn. Nor does the number of rows in a program's tile: taller tiles
repeat the same instruction, of the same size, for more rows.

The cause and the idea are He et al., Defeating Nondeterminism in LLM Inference (Thinking Machines Lab, 2025), whose
product keeps one tile for all sizes, without shares.
"""

# Triton reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.linear.gated import LINEAR
from core_cuda.ops import launching
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.workspace import counters

_PROGRAMS = 132
"""Programs among which K is shared out where a weight has few columns: one for each multiprocessor of an H100, and the
same on every GPU, so that their numbers do not differ by that."""
_LEAST_STEPS, _MOST_SHARES = 4, 16
_FEW_ROWS, _MANY_ROWS = 64, 512
_MOST_OF_FP32 = 1024
"""Depth of fp32 up to which errors stay within the criterion: on an H200, 4,096 came to 1.34 of its bound."""
_ROWS_IN_INSTRUCTION = (10, 11)
"""Major compute capabilities whose instruction is as tall as the tile, so that there is one height for all rows."""
_BARRIER_BYTES = 1024  # what waits for tiles, where matrix units read shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTiles:
    """How a product is cut. Only block_m, num_warps, num_stages and whole may depend on the number of rows."""

    block_m: int
    block_n: int
    block_k: int
    #: of K, one after the other, that are summed from zero
    share: int
    num_warps: int
    num_stages: int
    #: whether a program computes all shares of its tile
    whole: bool

    def num_shares(self, depth: int) -> int:
        """Return how many shares K has."""
        return max(-(-depth // self.share), 1)


def tiles_of(num_rows: int, columns: int, depth: int, dtype: torch.dtype) -> LinearTiles:
    """Return how x (M, K) of a dtype is multiplied by weight (N, K)."""
    wide = dtype == torch.float32  # on the ordinary units, which hold fewer numbers
    block_n, block_k = (64, 16) if wide else (128, 64)
    steps, tiles = -(-depth // block_k), -(-columns // block_n)
    shares = min(max(round(_PROGRAMS / max(tiles, 1)), 1), max(steps // _LEAST_STEPS, 1), _MOST_SHARES)
    share = max(-(-steps // shares), 1) * block_k
    few = LinearTiles(
        block_m=32 if wide else _FEW_ROWS,
        block_n=block_n,
        block_k=block_k,
        share=share,
        num_warps=4,
        num_stages=_num_stages(_FEW_ROWS, block_n, block_k, dtype),
        whole=shares == 1,
    )
    if num_rows <= _FEW_ROWS or wide or launching.capability()[0] in _ROWS_IN_INSTRUCTION:
        return replace(few, whole=few.whole or -(-num_rows // few.block_m) * tiles >= _PROGRAMS)
    # A result of several shares has two of everything that is summed, for which registers have no room in tall tiles.
    tall = shares == 1 and num_rows >= _MANY_ROWS and launching.has_shared_operands()
    height = 256 if tall else 128
    many = replace(few, block_m=height, num_warps=8, num_stages=_num_stages(height, block_n, block_k, dtype))
    return replace(many, whole=many.whole or -(-num_rows // height) * tiles >= _PROGRAMS)


def _num_stages(block_m: int, block_n: int, block_k: int, dtype: torch.dtype) -> int:
    room = launching.shared_bytes() - _BARRIER_BYTES
    return max(min(launching.num_stages(room, (block_m + block_n) * block_k * dtype.itemsize), 4), 1)


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::linear`, or None."""
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"x is {x.dtype} and weight {weight.dtype}, and the kernel takes one of {', '.join(map(str, DTYPES))}"
    if x.dtype == torch.float32 and weight.shape[1] > _MOST_OF_FP32:
        return (
            f"rows of {weight.shape[1]} numbers in fp32, whose sums in one order are exact enough up to {_MOST_OF_FP32}"
        )
    if 1 not in weight.stride():
        return "neither the rows nor the columns of weight are one run of memory each"
    return None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: LinearTiles | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: x (..., K), weight (N, K) of any strides, bias (N,) -> (..., N), in x's dtype.

    Sums in fp32, adds the bias to the sum, and rounds once. tiles overrides those chosen by shape.
    """
    columns, depth = weight.shape
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    rows = x.reshape(-1, depth)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows = rows.shape[0]
    out = x.new_empty((*x.shape[:-1], columns))
    tiles = tiles or tiles_of(num_rows, columns, depth, x.dtype)
    shares = tiles.num_shares(depth)
    grid = (triton.cdiv(num_rows, tiles.block_m), triton.cdiv(columns, tiles.block_n), 1 if tiles.whole else shares)
    shared = not tiles.whole and shares > 1
    partial = torch.empty((shares, num_rows, columns) if shared else 0, dtype=torch.float32, device=x.device)
    arrived = counters(grid[0] * grid[1], x.device) if shared else partial
    launching.launch(
        alike_linear_kernel, grid, rows, weight, bias, out, partial, arrived,
        num_rows, columns, depth, rows.stride(0), *weight.stride(), tiles.share, shares,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, EVEN_K=depth % tiles.block_k == 0,
        SHARED=shared, MANY=shares > 1, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


linear_alike = kernel_of(LINEAR, "alike")(multiply)


@triton.jit
def _share(x_tile, w_tile, begin, end, K, stride_k, live, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """Return one share of a tile, (BLOCK_M, BLOCK_N) fp32: K from begin to end, summed from zero."""
    steps = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        if EVEN_K:
            values = tl.load(x_tile + k, mask=live[:, None], other=0.0)
            weights = tl.load(w_tile + tl.cast(k, tl.int64) * stride_k)
        else:
            inside = k + steps < K
            values = tl.load(x_tile + k, mask=live[:, None] & inside[None, :], other=0.0)
            weights = tl.load(w_tile + tl.cast(k, tl.int64) * stride_k, mask=inside[:, None], other=0.0)
        acc = tl.dot(values, weights, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])  # one kernel for all numbers of rows
def alike_linear_kernel(
    x, weight, bias, out, partial, arrived, M, N, K, stride_x, stride_n, stride_k, share, shares,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SHARED: tl.constexpr,
    MANY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the result; SHARED: one share of it, kept in partial (shares, M, N), and the last adds them up.

    arrived: a counter for each tile, zero before and after. MANY: whether there is more than one share.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    live = rows < M
    # Columns past the end repeat the first ones: what needs no mask is copied without a way through registers.
    real = (columns % N).to(tl.int64)
    x_tile = x + rows.to(tl.int64)[:, None] * stride_x + steps[None, :]
    w_tile = weight + real[None, :] * stride_n + steps.to(tl.int64)[:, None] * stride_k
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    inside = live[:, None] & (columns < N)[None, :]
    places = rows.to(tl.int64)[:, None] * N + columns[None, :]
    is_last = True
    if SHARED:
        begin = tl.program_id(2) * share
        total = _share(x_tile, w_tile, begin, tl.minimum(begin + share, K), K, stride_k, live, BLOCK_M, BLOCK_N,
                       BLOCK_K, EVEN_K)  # fmt: skip
        size = M.to(tl.int64) * N
        tl.store(partial + tl.program_id(2) * size + places, total, mask=inside)
        tl.debug_barrier()  # all threads must have written the share before the arrival is counted
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == shares - 1
        if is_last:
            tl.store(arrived + tile, 0)  # reset for the next launch
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for each in range(shares):
                total += tl.load(partial + each * size + places, mask=inside, other=0.0, cache_modifier=".cg")
    elif MANY:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for each in range(shares):
            begin = each * share
            total += _share(x_tile, w_tile, begin, tl.minimum(begin + share, K), K, stride_k, live, BLOCK_M, BLOCK_N,
                            BLOCK_K, EVEN_K)  # fmt: skip
    else:
        total = _share(x_tile, w_tile, 0, K, K, stride_k, live, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    if is_last:
        if bias is not None:
            total += tl.load(bias + columns % N).to(tl.float32)[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)
