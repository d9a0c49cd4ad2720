"""The kernel that sums over GPUs, and adds a residual and normalises where asked to.

Each GPU writes its part into the memory of all others and reads what they wrote to its own, so that data cross NVLink
once and no signal follows them: an element has come when it is not `EMPTY` any more (as in the "Lamport" kernels of
TensorRT-LLM). A program sends and receives rows of its own, with the same program of the other GPUs:

- It sends to one half of its areas and the other in turns, and empties what it has read. A GPU that sends to a half
  again has got the sum in between, and so the other GPU's program had ended that read this half before.
- The turn stands in memory, so a replayed graph goes on where any other call has stopped.
- Programs wait for others only after they have sent, and are no more than run at once.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.symmetric import Shared

MAX_ROW_BYTES = 2**15
"""The longest row that a program holds in registers."""
_TILE = 8192
_LEAST = 1024
"""Elements that a program takes at once: at most, unless a row is longer, and in a plain sum at least."""
_PER_THREAD = 8
_MAX_WARPS = 32


@triton.jit
def _sent(
    x, at, inside, place, areas, RANK: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr
):
    """Send elements to all other GPUs, at `place` of the areas of this one, and return their bits."""
    bits = tl.load(x + at, mask=inside, other=0.0).to(BITS, bitcast=True)
    bits = tl.where(bits == -1, bits & ((1 << (BITS.primitive_bitwidth - 1)) - 1), bits)  # another NaN than `EMPTY`
    for other in tl.static_range(SIZE):
        if other != RANK:
            area = tl.multiple_of(areas[other].to(tl.pointer_type(BITS)), 16)
            tl.store(area + RANK * STRIDE + place, bits, mask=inside)
    return bits


@triton.jit
def _received(area, place, inside):
    """Wait for elements, and return their bits. Only this thread block's own GPU reads here."""
    bits = tl.load(area + place, mask=inside, other=0, volatile=True)
    while tl.max(tl.max((bits == -1).to(tl.int32), axis=1), axis=0) > 0:
        bits = tl.load(area + place, mask=inside, other=0, volatile=True)
    return bits


@triton.jit
def sum_kernel(
    x, residual, weight, out, total, mine, areas, turns, num_elements, eps, RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, AREA: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, NORMED: tl.constexpr, FACTOR: tl.constexpr,
    PRODUCT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum x over GPUs in fp32, in the order of ranks, rounded to its dtype; with NORM, RMSNorm of that.

    x, residual, out, total (rows, WIDTH), contiguous; weight (WIDTH,). residual: None, or added to the sum first, which
    goes to `total`, rounded. mine: this GPU's areas; areas: the address of each GPU's. AREA: elements of an area.
    EARLY: whether the kernel may overlap with those around it, as OVERLAP says of other kernels.
    """
    TILE: tl.constexpr = ROWS * WIDTH
    STRIDE: tl.constexpr = PROGRAMS * AREA
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    here = tl.arange(0, ROWS)[:, None] * WIDTH + column
    wait_for_inputs(EARLY)
    start_next(EARLY)
    turn = tl.load(turns + program)
    place = turn * (SIZE * STRIDE) + program * AREA + here
    at = program * TILE + here
    inside = (column < WIDTH) & (at < num_elements)
    own = _sent(x, at, inside, place, areas, RANK, SIZE, STRIDE, BITS)
    factor = None
    if weight is not None:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(FACTOR).to(tl.float32)
        if OFFSET != 0.0:
            factor = (factor + OFFSET).to(FACTOR).to(tl.float32)
    for _ in range(program * TILE, num_elements, tl.num_programs(0) * TILE):
        # The next rows are sent before these are waited for, so that NVLink is never idle.
        next_at = at + tl.num_programs(0) * TILE
        next_inside = (column < WIDTH) & (next_at < num_elements)
        next_own = _sent(x, next_at, next_inside, place + TILE, areas, RANK, SIZE, STRIDE, BITS)
        if residual is not None:
            added = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        summed = tl.zeros((ROWS, BLOCK), tl.float32)
        for rank in tl.static_range(SIZE):
            bits = own if rank == RANK else _received(mine + rank * STRIDE, place, inside)
            part = bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            summed = part if rank == 0 else summed + part
        result = summed.to(x.dtype.element_ty)
        if NORM:
            if residual is not None:
                result = (result.to(tl.float32) + added).to(total.dtype.element_ty)
                tl.store(total + at, result, mask=inside)
            values = result.to(tl.float32)
            deviation = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
            normed = (values * deviation[:, None]).to(NORMED).to(tl.float32)
            if factor is not None:
                normed = (normed * factor).to(PRODUCT).to(tl.float32)
            result = normed.to(out.dtype.element_ty)
        tl.store(out + at, result, mask=inside)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                tl.store(mine + rank * STRIDE + place, tl.full((ROWS, BLOCK), -1, BITS), mask=inside)
        own = next_own
        at = next_at
        inside = next_inside
        place += TILE
    tl.store(turns + program, 1 - turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How a sum is shared out among programs, on all GPUs of a group alike."""

    width: int
    rows: int
    num_programs: int
    num_warps: int


def shares_of(shared: Shared, num_elements: int, element_size: int, width: int = 0) -> Shares | None:
    """Return the shares of a sum, None where it is empty or does not fit the areas.

    width: of rows that are to be normalised; 0 where there are none. All that is asked here is equal on all GPUs.
    """
    most = shared.num_programs
    if not width:
        width = min(max(triton.next_power_of_2(triton.cdiv(num_elements, most)), _LEAST), _TILE)
    block = triton.next_power_of_2(width)
    spread = max(num_elements // (width * most), 1)
    rows = min(max(_TILE // block, 1), 1 << (spread.bit_length() - 1))
    num_tiles = triton.cdiv(num_elements, rows * width)
    if not num_tiles or block * element_size > MAX_ROW_BYTES:
        return None
    if triton.cdiv(num_tiles, most) * rows * width * element_size > shared.area_bytes:
        return None
    num_warps = min(max(rows * block // (32 * _PER_THREAD), 1), _MAX_WARPS)
    return Shares(width=width, rows=rows, num_programs=min(num_tiles, most), num_warps=num_warps)


_PLAIN: Mapping[str, Any] = MappingProxyType(
    {"weight": None, "eps": 0.0, "OFFSET": 0.0, "NORMED": tl.float32, "FACTOR": tl.float32, "PRODUCT": tl.float32}
)


def launch_sum(
    shared: Shared,
    shares: Shares,
    x: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm: Mapping[str, Any] | None = None,
) -> None:
    """Launch the kernel; all GPUs of the group do so, with the same shares, shapes and dtypes.

    x, residual, out, total: contiguous, of one shape. norm: None for a plain sum, else weight, eps, OFFSET, NORMED,
    FACTOR and PRODUCT as `core_cuda.ops.norm.norms.options_of` gives them.
    """
    early, wide = launching.can_overlap(), x.element_size() == 4
    launching.launch(
        sum_kernel,
        (shares.num_programs,),
        x=x,
        residual=residual,
        out=out,
        total=total,
        mine=shared.mine.view(torch.int32 if wide else torch.int16),
        areas=shared.places,
        turns=shared.turns,
        num_elements=x.numel(),
        **{name: (norm or _PLAIN)[name] for name in _PLAIN},
        RANK=shared.rank,
        SIZE=shared.size,
        PROGRAMS=shared.num_programs,
        AREA=shared.area_bytes // x.element_size(),
        BITS=tl.int32 if wide else tl.int16,
        WIDTH=shares.width,
        BLOCK=triton.next_power_of_2(shares.width),
        ROWS=shares.rows,
        NORM=norm is not None,
        EARLY=early,
        num_warps=shares.num_warps,
        **({"launch_pdl": True} if early and launching.may_overlap() else {}),
    )
