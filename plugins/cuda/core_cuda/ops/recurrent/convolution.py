"""`core::causal_conv1d_update` in one launch: a program shifts and sums the windows of some channels of a row."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.states import block_of, in_rows, places, slot_of
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import TYPES


@triton.jit
def _convolution_kernel(
    x, states, weight, bias, slots, kept, out, x_row, state_slot, CHANNELS: tl.constexpr, LENGTH: tl.constexpr,
    TAPS: tl.constexpr, SILU: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROUNDED: the dtype of weight, to which the sum is rounded. A thread has whole channels: it reads each input of a
    window before it writes there."""
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
    if bias is not None:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    total = total.to(ROUNDED).to(tl.float32)
    if SILU:
        total = (total * tl.sigmoid(total)).to(ROUNDED).to(tl.float32)
    tl.store(out + row * CHANNELS + channels, total, mask=mask)


@kernel_of(CAUSAL_CONV1D_UPDATE)
def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    kept: Tensor | None,
    silu: bool,
) -> Tensor:
    """Do what the canonical op does."""
    rows, channels = x.shape
    x, weight = in_rows(x), weight.contiguous()
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    block = block_of(rows, channels, most=512, least=64)
    launching.launch(
        _convolution_kernel,
        (rows * triton.cdiv(channels, block),),
        x,
        states,
        weight,
        None if bias is None else bias.contiguous(),
        *places(slots, kept),
        out,
        x.stride(0),
        states.stride(0),
        CHANNELS=channels,
        LENGTH=states.shape[2],
        TAPS=weight.shape[1],
        SILU=silu,
        ROUNDED=TYPES[weight.dtype],
        BLOCK=block,
        num_warps=max(block // 128, 1),
    )
    return out
