"""Short convolutions of packed sequences: a program sums the windows of some channels of a tile of rows.

Most tiles of a prompt lie inside one sequence, behind the rows whose windows reach into its state: there each row is
read once, and nothing else but the weights. The other tiles look for the sequence of a row wherever one ends.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.states import block_of, num_sequences, rows_of, slot_of

_CHANNELS_OF_THREAD = 8  # 16 bytes of half precision: the widest load
_PROGRAMS_OF_MULTIPROCESSOR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How packed rows are shared out among programs."""

    #: rows that a program takes: it reads the weights once for all of them and, inside a sequence, loads them at once
    rows: int
    #: channels that a program takes
    block: int

    @property
    def num_warps(self) -> int:
        """Return how many warps have so many channels."""
        return max(self.block // (32 * _CHANNELS_OF_THREAD), 1)


def tiles_of(num_rows: int, channels: int) -> Tiles:
    """Return how so many packed rows are shared out: in lower tiles, then fewer channels, where programs are few."""
    rows, block = 4, min(256, triton.next_power_of_2(channels))
    wanted = _PROGRAMS_OF_MULTIPROCESSOR * launching.num_multiprocessors()
    while rows > 1 and triton.cdiv(num_rows, rows) * triton.cdiv(channels, block) < wanted:
        rows //= 2
    block = block_of(triton.cdiv(num_rows, rows), channels, most=block, least=64)
    return Tiles(rows=rows, block=block)


@triton.jit
def input_at(x, source, first, offset, x_row, channels, mask, LENGTH: tl.constexpr):
    """Return the inputs of some channels at an offset from a sequence's first row; before that lies the state."""
    known = tl.load(source + (LENGTH + offset), mask=mask & (offset < 0), other=0.0)
    own = tl.load(x + (first + offset) * x_row + channels, mask=mask & (offset >= 0), other=0.0)
    return tl.where(offset < 0, known, own)


@triton.jit
def finished(total, shift, SILU: tl.constexpr, ROUNDED: tl.constexpr):
    if shift is not None:
        total += shift
    total = total.to(ROUNDED).to(tl.float32)
    if SILU:
        total = (total * tl.sigmoid(total)).to(ROUNDED).to(tl.float32)
    return total


@triton.jit
def _place_of(query_starts, row, num_sequences):
    """Return the sequence of a packed row, its first row and the first after it; num_sequences, and the last sequence's
    rows, for padding."""
    low, high = 0, num_sequences
    while low < high:  # the first sequence that ends behind the row
        middle = (low + high) // 2
        ends = tl.load(query_starts + middle + 1) <= row
        low, high = tl.where(ends, middle + 1, low), tl.where(ends, high, middle)
    first, last = rows_of(query_starts, tl.minimum(low, num_sequences - 1))
    return low, first, last


@triton.jit
def _factors(weights, taps, TAPS: tl.constexpr):
    """Return the columns of weights as a tuple of fp32 vectors."""
    bits = weights.to(tl.float32).to(tl.int32, bitcast=True)  # a sum of floats would lose the sign of a zero
    factors: tl.tuple = ()
    for tap in tl.static_range(0, TAPS):
        factors += (tl.sum(tl.where(taps == tap, bits, 0), axis=1).to(tl.float32, bitcast=True),)
    return factors


@triton.jit
def _tile(
    x, states, slots, query_starts, out, factors, shift, row, channels, mask, x_row, state_slot, num_rows,
    num_sequences, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Some channels of the rows of a tile, each loaded once, TOGETHER before the first is computed: the last ones
    stay in registers, as a window. INSIDE: all windows lie in the rows of one sequence; else the window is made anew
    wherever a sequence begins."""
    window: tl.tuple = ()
    for i in tl.static_range(0, TAPS - 1):
        at = row - (TAPS - 1) + i
        window += (tl.load(x + at * x_row + channels, mask=mask & INSIDE, other=0.0),)
    last, real = row, row < 0  # of no sequence yet: the tile's first row looks for its own
    for start in range(0, ROWS, TOGETHER):
        own: tl.tuple = ()
        for i in tl.static_range(0, TOGETHER):
            at = row + start + i
            known = mask if INSIDE else mask & (at < num_rows)
            own += (tl.load(x + at * x_row + channels, mask=known, other=0.0),)
        for i in tl.static_range(0, TOGETHER):
            at = row + start + i
            if not INSIDE:  # noqa: SIM102  # one is known when the kernel is compiled, the other is not
                if at >= last:
                    sequence, first, last = _place_of(query_starts, at, num_sequences)
                    real = sequence < num_sequences
                    last = tl.where(real, last, row + ROWS)  # padding ends nowhere
                    used = mask & real
                    slot = slot_of(slots, tl.minimum(sequence, num_sequences - 1))
                    source = states + slot * state_slot + channels * LENGTH
                    window = ()
                    for j in tl.static_range(0, TAPS - 1):
                        offset = at - first - (TAPS - 1) + j
                        window += (input_at(x, source, first, offset, x_row, channels, used, LENGTH),)
            window += (own[i],)
            total = tl.zeros(channels.shape, dtype=tl.float32)
            for tap in tl.static_range(0, TAPS):
                total += window[tap].to(tl.float32) * factors[tap]
            total = finished(total, shift, SILU, ROUNDED)
            if INSIDE:
                tl.store(out + at * CHANNELS + channels, total, mask=mask)
            else:
                tl.store(out + at * CHANNELS + channels, tl.where(real, total, 0.0), mask=mask & (at < num_rows))
            window = window[1:]


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])  # one kernel for all numbers of rows
def _packed_kernel(
    x, states, weight, bias, slots, query_starts, out, x_row, state_slot, num_rows, num_sequences,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, SILU: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some channels of a tile of rows of packed sequences; the states are not written."""
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    channels = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    taps = tl.arange(0, BLOCK_TAPS)[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    # As one run of memory: a load for each tap would touch as many lines as there are threads, more than the rows do.
    weights = tl.load(weight + channels[:, None] * TAPS + taps, mask=mask[:, None] & (taps < TAPS), other=0.0)
    shift = None
    if bias is not None:
        shift = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    _, first, last = _place_of(query_starts, row, num_sequences)
    factors = _factors(weights, taps, TAPS)
    if (first <= row - (TAPS - 1)) & (row + ROWS <= last):
        _tile(x, states, slots, query_starts, out, factors, shift, row, channels, mask, x_row, state_slot, num_rows,
              num_sequences, CHANNELS, LENGTH, TAPS, SILU, ROUNDED, ROWS, ROWS, True)  # fmt: skip
    else:  # row by row: a search for each of several at once would take half as many registers again
        _tile(x, states, slots, query_starts, out, factors, shift, row, channels, mask, x_row, state_slot, num_rows,
              num_sequences, CHANNELS, LENGTH, TAPS, SILU, ROUNDED, ROWS, 1, False)  # fmt: skip


def convolve_packed(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    query_starts: Tensor,
    out: Tensor,
    tiles: Tiles,
    **how: Any,
) -> None:
    """Write the convolution of packed rows to out, from the states before them.

    how: TAPS, SILU and ROUNDED, the dtype that sums are rounded to. Of x the columns are one run of memory, all other
    tensors are contiguous, of the states each.
    """
    (rows, channels), length = x.shape, states.shape[2]
    count = num_sequences(rows, query_starts)
    launching.launch(
        _packed_kernel,
        (triton.cdiv(rows, tiles.rows) * triton.cdiv(channels, tiles.block),),
        *(x, states, weight, bias, slots, query_starts, out, x.stride(0), states.stride(0), rows, count),
        CHANNELS=channels,
        LENGTH=length,
        BLOCK=tiles.block,
        ROWS=tiles.rows,
        BLOCK_TAPS=triton.next_power_of_2(weight.shape[1]),
        **how,
        num_warps=tiles.num_warps,
    )
