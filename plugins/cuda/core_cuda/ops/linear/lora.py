"""`core::add_lora`: two kernels, the first to the adapters' small rank and the second back, whatever rows have which.

Legend of shapes as in core/common/ops/linear/lora.py: M rows, K slots of rank R, P layers side by side.

`shrink_kernel` multiplies rows by A: a program takes some of the K * R columns of one layer, a share of the depth, and
ends at once where no row of its tile has one of these adapters. `expand_kernel` multiplies by B and adds to what the
layers gave; it adds up the shares, in a fixed order. Rows need not be sorted: each keeps the columns of its own slot,
and of A and B only those are read that some row of a tile has, as in the kernels of Punica (Chen et al., arXiv
2310.18547) and S-LoRA (Sheng et al., arXiv 2311.03285). So one pair of kernels serves decode and prompts.

No kernel of a step writes A, B or the slots. The slots are read early as a guess, by which the rows of A and B that
will be wanted are fetched into the L2 cache while the kernel before still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.linear.lora import ADD_LORA
from core_cuda.ops import launching
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import Early, fetch, start_next, wait_for_inputs
from core_cuda.ops.registration import kernel_of

_SLOTS = Early("an input of the step: it says which rows of A and B are fetched", guess=True)
READ_EARLY = {"shrink_kernel": {"slots": _SLOTS}, "expand_kernel": {"slots": _SLOTS}}
_PARTS = 4
"""Layers that a launch takes; more are taken by several."""
_ALIGNED = {"a rank of": 4, "layers of features": 8}
_LINE = 128  # bytes that are fetched at once
_FEW_ROWS = 256
"""Up to which a step is one of decode, where what counts is to have all of the GPU read A and B at once."""


@triton.jit
def _owned(slots, rows, columns, M, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """Return which of these columns of K * R each row keeps."""
    taken = tl.load(slots + rows, mask=rows < M, other=0, cache_modifier=".cg")
    owners = (columns // RANK + 1).to(tl.int64)
    return (taken[:, None] == owners[None, :]) & (columns < WIDTH)[None, :]


@triton.jit
def _any(mask, axis: tl.constexpr):
    return tl.max(mask.to(tl.int32), axis) > 0


@triton.jit(do_not_specialize=["M"])  # compile one kernel for all numbers of rows
def shrink_kernel(
    x, a, slots, partial, M, depth, stride_x, stride_a, share,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """partial (shares, M, PARTS, RANK) fp32 = this share of x A^T, where a row has the adapter of a column.

    LINES: those of a row of A that are fetched early, 0 for none.
    """
    TILES: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    number, split = tl.program_id(0), tl.program_id(2)
    part = number // TILES
    columns = number % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = split * share
    end = tl.minimum(begin + share, depth)
    downs = (part * WIDTH + tl.minimum(columns, WIDTH - 1)).to(tl.int64) * stride_a
    if OVERLAP and LINES > 0:
        guess = _any(_owned(slots, rows, columns, M, RANK, WIDTH), 0)
        places = begin + tl.arange(0, LINES) * (1024 // a.dtype.element_ty.primitive_bitwidth)
        wanted = guess[:, None] & (places < end)[None, :]
        fetch(a + tl.where(wanted, downs[:, None] + places[None, :], 0))
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    own = _owned(slots, rows, columns, M, RANK, WIDTH)
    used, active = _any(own, 0), _any(own, 1)
    if _any(used, 0):
        steps = tl.arange(0, BLOCK_I)
        x_tile = x + rows.to(tl.int64)[:, None] * stride_x + steps[None, :]
        a_tile = a + downs[:, None] + steps[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        for k in range(begin, end, BLOCK_I):
            inside = (k + steps < end)[None, :]
            values = tl.load(x_tile + k, mask=active[:, None] & inside, other=0.0)
            tile = tl.load(a_tile + k, mask=used[:, None] & inside, other=0.0)
            acc = tl.dot(values, tl.trans(tile), acc, input_precision="ieee")
        place = ((split * M + rows).to(tl.int64)[:, None] * PARTS + part) * RANK + (columns % RANK)[None, :]
        tl.store(partial + place, acc, mask=own)


@triton.jit(do_not_specialize=["M"])
def expand_kernel(
    base, b, slots, partial, out, M, columns_out, stride_base, stride_b, stride_out, size_0, size_1, size_2, size_3,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = base + the sum of the shares of `partial`, rounded to B's dtype, times B^T; a tile lies in one layer.

    size_0 to size_3: columns of each layer, 0 where there is none.
    """
    number = tl.program_id(0)
    tiles_0, tiles_1, tiles_2 = tl.cdiv(size_0, BLOCK_N), tl.cdiv(size_1, BLOCK_N), tl.cdiv(size_2, BLOCK_N)
    past_0 = (number >= tiles_0).to(tl.int32)
    past_1 = (number >= tiles_0 + tiles_1).to(tl.int32)
    past_2 = (number >= tiles_0 + tiles_1 + tiles_2).to(tl.int32)
    part = past_0 + past_1 + past_2
    first = past_0 * size_0 + past_1 * size_1 + past_2 * size_2
    last = size_0 + past_0 * size_1 + past_1 * size_2 + past_2 * size_3
    tile = number - past_0 * tiles_0 - past_1 * tiles_1 - past_2 * tiles_2
    columns = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ups = b + tl.minimum(columns, columns_out - 1).to(tl.int64) * stride_b
    if OVERLAP and FETCH:
        guess = tl.load(slots + rows, mask=rows < M, other=0, cache_modifier=".cg")
        if tl.max(guess, 0) > 0:
            for c in range(0, WIDTH, 1024 // b.dtype.element_ty.primitive_bitwidth):
                fetch(ups + c)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, WIDTH, BLOCK_C):
        inner = c + tl.arange(0, BLOCK_C)
        own = _owned(slots, rows, inner, M, RANK, WIDTH)
        used = _any(own, 0)
        if _any(used, 0):
            place = (rows.to(tl.int64)[:, None] * PARTS + part) * RANK + (inner % RANK)[None, :]
            shrunk = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
            for split in tl.static_range(SPLITS):  # in a fixed order, for the same bits each time
                shares = partial + (M * (PARTS * RANK)).to(tl.int64) * split
                shrunk += tl.load(shares + place, mask=own, other=0.0)
            up = tl.load(ups[:, None] + inner[None, :], mask=used[None, :], other=0.0)
            acc = tl.dot(shrunk.to(up.dtype), tl.trans(up), acc, input_precision="ieee")
    inside = (rows < M)[:, None] & (columns < last)[None, :]
    from_base = base + rows.to(tl.int64)[:, None] * stride_base + columns[None, :]
    result = tl.load(from_base, mask=inside, other=0.0).to(tl.float32) + acc
    to = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """How the two kernels are divided among programs."""

    block_m: int
    #: columns of K * R, of a program of either kernel
    shrink_c: int
    expand_c: int
    #: of the depth, and of the result's columns
    block_i: int
    block_n: int
    #: programs that share the depth, a power of 2
    splits: int
    num_stages: int
    #: whether A and B are fetched early
    fetch: bool


def lora_config(rows: int, depth: int, columns: int, width: int, parts: int, itemsize: int) -> LoraConfig:
    """Return the configuration for so many rows of x (depth) and of the result (columns), of K * R = width.

    A guess from the sizes alone.
    """
    few, units = rows <= _FEW_ROWS, launching.num_multiprocessors()
    block_m = max(16, min(64, triton.next_power_of_2(rows)))
    wide = max(16, min(64, triton.next_power_of_2(width)))
    shrink_c = 16 if few else wide
    block_i = (512 if block_m == 16 else 256) // itemsize
    programs = parts * triton.cdiv(width, shrink_c) * triton.cdiv(rows, block_m)
    splits, most = 1, 8 if block_m == 16 else 4
    while splits < most and 2 * splits * programs <= units and 4 * splits * block_i <= depth:
        splits *= 2
    # Wide tiles where narrow ones would be many. What registers hold is less in fp32, and beside shares of many rows.
    in_fp32, rounds = itemsize > 2, triton.cdiv(columns, 48 * units)
    block_n = 32 if in_fp32 or (few and rounds == 1) else 64 if few and rounds == 2 else 128
    expand_c = min(wide, 32) if in_fp32 or (few and block_m == 64) else wide
    stages = 4 if block_m == 16 else 3
    return LoraConfig(block_m, shrink_c, expand_c, block_i, block_n, splits, stages, fetch=few)


@kernel_of(ADD_LORA)
def add_lora(base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank: int, sizes: Sequence[int]) -> Tensor:
    """Add what adapters give by two launches, more where there are more layers than a launch takes."""
    width = b.shape[1]
    rows = _as_rows(x)
    given, out = _as_rows(base), base.new_empty((slots.shape[0], base.shape[-1]))
    first = 0
    for begin in range(0, len(sizes), _PARTS):
        some = sizes[begin : begin + _PARTS]
        columns = slice(first, first + sum(some))
        downs = a[begin * width : (begin + len(some)) * width]
        _add(given[:, columns], rows, downs, b[columns], slots, out[:, columns], rank, some)
        first = columns.stop
    return out.view(base.shape)


def _add(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, out: Tensor, rank: int, sizes: Sequence[int]
) -> None:
    (num_rows, depth), (columns, width), parts = x.shape, b.shape, len(sizes)
    config = lora_config(num_rows, depth, columns, width, parts, x.itemsize)
    steps = triton.cdiv(triton.cdiv(depth, config.block_i), config.splits)
    share = steps * config.block_i
    splits = config.splits if depth > (config.splits - 1) * share else triton.cdiv(depth, share)
    partial = torch.empty((splits, num_rows, parts, rank), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_rows, config.block_m)
    form = {"RANK": rank, "WIDTH": width, "PARTS": parts, "BLOCK_M": config.block_m}
    lines = triton.next_power_of_2(triton.cdiv(share * a.itemsize, _LINE)) if config.fetch else 0
    launching.launch(
        shrink_kernel, (parts * triton.cdiv(width, config.shrink_c), tiles, splits), x, a, slots, partial,
        num_rows, depth, x.stride(0), a.stride(0), share,
        BLOCK_C=config.shrink_c, BLOCK_I=config.block_i, LINES=lines, num_warps=4, num_stages=config.num_stages, **form,
    )  # fmt: skip
    four = (*sizes, *[0] * (_PARTS - parts))
    launching.launch(
        expand_kernel, (sum(triton.cdiv(size, config.block_n) for size in sizes), tiles), base, b, slots, partial, out,
        num_rows, columns, base.stride(0), b.stride(0), out.stride(0), *four,
        SPLITS=splits, BLOCK_N=config.block_n, BLOCK_C=config.expand_c, FETCH=config.fetch,
        num_warps=8 if config.block_m * config.block_n > 4096 else 4, num_stages=1, **form,
    )  # fmt: skip


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call, or None."""
    args, taken = call.args, tuple(each for each in DTYPES if each.itemsize == 2)
    if args["x"].dtype not in taken:
        return f"x is {args['x'].dtype}, and the kernels take {', '.join(map(str, taken))}"
    for name in ("a", "b"):
        if args[name].stride(1) != 1:
            return f"the rows of {name} are not one run of memory each"
    sizes = {"a rank of": (args["rank"],), "layers of features": (args["x"].shape[-1], *args["sizes"])}
    for what, found in sizes.items():
        if any(size % _ALIGNED[what] for size in found):
            # On an H200 `shrink_kernel` gives wrong sums for a rank of 3 at some sizes, with 4 warps and not with one;
            # ranks of 2 and 5 were right. Triton's code for 3 differs from that for 5 in constants alone.
            return f"it has {what} {', '.join(map(str, found))}, and the kernels take multiples of {_ALIGNED[what]}"
    return None


def _as_rows(x: Tensor) -> Tensor:
    """Return x as (M, columns), each row one run of memory."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
