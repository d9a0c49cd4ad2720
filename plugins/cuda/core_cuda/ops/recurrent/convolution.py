"""`core::causal_conv1d_update`: a program sums the windows of some channels of a row.

Of one token of each sequence it shifts them, too; the rows of packed sequences are summed in tiles
(convolution_tiles.py). The states after them are written by a launch of their own, since several rows read the state
before them.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.convolution_tiles import convolve_packed, finished, input_at, tiles_of
from core_cuda.ops.recurrent.states import block_of, in_one_run, in_rows, num_sequences, places, rows_of, slot_of
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import TYPES


@triton.jit
def _convolution_kernel(
    x, states, weight, bias, slots, kept, out, x_row, state_slot, CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
    TAPS: tl.constexpr, SILU: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token of each sequence. ROUNDED: the dtype of weight, to which the sum is rounded. A thread has whole
    channels: it reads each input of a window before it writes there."""
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channels = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    source = states + slot_of(slots, row) * state_slot + channels * LENGTH
    target = states + slot_of(kept, row) * state_slot + channels * LENGTH
    token = tl.load(x + row * x_row + channels, mask=mask, other=0.0)
    total = token.to(tl.float32) * tl.load(weight + channels * TAPS + (TAPS - 1), mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(0, LENGTH):
        if i >= LENGTH - TAPS + 1:
            old = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
            factor = tl.load(weight + channels * TAPS + (i - (LENGTH - TAPS + 1)), mask=mask, other=0.0)
            total += old * factor.to(tl.float32)
        if i < LENGTH - 1:
            tl.store(target + i, tl.load(source + i + 1, mask=mask), mask=mask)
        else:
            tl.store(target + i, token, mask=mask)
    shift = None
    if bias is not None:
        shift = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    total = finished(total, shift, SILU, ROUNDED)
    tl.store(out + row * CHANNELS + channels, total, mask=mask)


@triton.jit
def _states_kernel(
    x, states, slots, kept, query_starts, x_row, state_slot, CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The states of some channels after a packed sequence."""
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // blocks
    channels = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[:, None]
    places = tl.arange(0, BLOCK_LENGTH)[None, :]
    mask = (channels < CHANNELS) & (places < LENGTH)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first, last = rows_of(query_starts, sequence)
    source = states + slot_of(slots, sequence) * state_slot + channels * LENGTH
    target = states + slot_of(kept, sequence) * state_slot + channels * LENGTH
    new = input_at(x, source, first, last - first - LENGTH + places, x_row, channels, mask, LENGTH)
    tl.debug_barrier()  # the same memory, often: all of it has to be read before any is written
    tl.store(target + places, new, mask=mask)


@kernel_of(CAUSAL_CONV1D_UPDATE)
def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    kept: Tensor | None,
    query_starts: Tensor | None,
    silu: bool,
) -> Tensor:
    """Do what the canonical op does."""
    rows, channels = x.shape
    x, weight = in_rows(x), weight.contiguous()
    bias = in_one_run(bias)
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    block = block_of(rows, channels, most=512, least=64)
    blocks, (read, written) = triton.cdiv(channels, block), places(slots, kept)
    sizes = {"CHANNELS": channels, "LENGTH": states.shape[2], "BLOCK": block, "num_warps": max(block // 128, 1)}
    how = {"TAPS": weight.shape[1], "SILU": silu, "ROUNDED": TYPES[weight.dtype]}
    strides = x.stride(0), states.stride(0)
    if query_starts is None:
        inputs = x, states, weight, bias, read, written, out
        launching.launch(_convolution_kernel, (rows * blocks,), *inputs, *strides, **sizes, **how)
        return out
    starts, count = query_starts.contiguous(), num_sequences(rows, query_starts)
    convolve_packed(x, states, weight, bias, read, starts, out, tiles_of(rows, channels), **how)
    sizes["BLOCK_LENGTH"] = triton.next_power_of_2(states.shape[2])
    launching.launch(_states_kernel, (count * blocks,), x, states, read, written, starts, *strides, **sizes)
    return out
