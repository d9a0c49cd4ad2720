"""`core::selective_state_update` in one launch: a program moves some features of a head's state on, in registers.

Here are single tokens of Mamba 2's form, and few or wide ones of prompts; space_chunks.py has prompts, in parallel over
chunks, and feature_space.py the form of Mamba.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.recurrent import SELECTIVE_STATE_UPDATE
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent import feature_space, space_chunks
from core_cuda.ops.recurrent import states as common
from core_cuda.ops.recurrent.space_call import SpaceCall, strides_of
from core_cuda.ops.recurrent.states import (
    block_of,
    exponential,
    in_one_run,
    in_rows,
    results,
    rows_of,
    slot_of,
    softplus,
    within,
)
from core_cuda.ops.registration import kernel_of

MAX_STATE = 512
"""Numbers of state of a feature at most: a program holds a row of all of them."""


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call, or None."""
    size = call.args["B"].shape[-1]
    if size > MAX_STATE:
        return f"a feature has {size} numbers of state, and the kernel takes up to {MAX_STATE}"
    return common.why_not(call)


@triton.jit
def _state_space_kernel(
    x, dt, A, B, C, states, D, dt_bias, bounded, slots, kept, query_starts, out, x_row, x_head, dt_row, dt_head, B_row,
    B_group, C_row, C_group, A_head, D_head, bias_head, state_slot, HEADS: tl.constexpr, GROUP: tl.constexpr,
    FEATURES: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STATE: tl.constexpr,
    SOFTPLUS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK features of one head of one sequence, with their STATE numbers of state each, token by token."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    features = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.arange(0, BLOCK_STATE)
    shown, own = features < FEATURES, numbers < STATE
    offsets = head * (FEATURES * STATE) + features[:, None] * STATE + numbers[None, :]
    mask = shown[:, None] & own[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first, last = rows_of(query_starts, sequence)
    state = tl.load(states + slot_of(slots, sequence) * state_slot + offsets, mask=mask, other=0.0).to(tl.float32)
    for row in range(first, last):
        token = tl.load(x + row * x_row + head * x_head + features, mask=shown, other=0.0).to(tl.float32)
        keys = tl.load(B + row * B_row + (head // GROUP) * B_group + numbers, mask=own, other=0.0).to(tl.float32)
        queries = tl.load(C + row * C_row + (head // GROUP) * C_group + numbers, mask=own, other=0.0).to(tl.float32)
        step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
        if dt_bias is not None:
            step += tl.load(dt_bias + head * bias_head).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step)
        step = within(step, bounded, row, row < last, LEAST, MOST)
        state *= exponential(step * tl.load(A + head * A_head).to(tl.float32))
        state += (step * token)[:, None] * keys[None, :]
        result = tl.sum(state * queries[None, :], 1)
        if D is not None:
            result += token * tl.load(D + head * D_head).to(tl.float32)
        tl.store(out + (row * HEADS + head) * FEATURES + features, result, mask=shown)
    tl.store(states + slot_of(kept, sequence) * state_slot + offsets, state, mask=mask)


@kernel_of(SELECTIVE_STATE_UPDATE)
def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    bounded: Tensor | None,
    slots: Tensor | None,
    kept: Tensor | None,
    query_starts: Tensor | None,
) -> Tensor:
    """Do what the canonical op does."""
    given = dt_softplus, dt_min, dt_max, in_one_run(bounded), slots, kept, in_one_run(query_starts)
    call = SpaceCall(in_rows(x), dt, A, in_rows(B), in_rows(C), states, D, dt_bias, *given)
    if A.dim() == 3:
        return feature_space.along_features(call)
    if query_starts is not None and space_chunks.takes(x.shape[0], call.num_sequences, B.shape[2]):
        return space_chunks.in_chunks(call)
    return _row_by_row(call)


def _row_by_row(call: SpaceCall) -> Tensor:
    (_, heads, features), count, out = call.x.shape, call.num_sequences, results(call.x, call.query_starts)
    block_state = triton.next_power_of_2(call.B.shape[2])
    block = block_of(count * heads, features, most=max(8192 // block_state, 4), least=4)
    strides = (*call.x.stride()[:2], *call.dt.stride(), *call.B.stride()[:2], *call.C.stride()[:2], call.A.stride(0))
    launching.launch(
        _state_space_kernel,
        (count * heads * triton.cdiv(features, block),),
        *call.tensors,
        out,
        *strides,
        *strides_of(call.D, 1),
        *strides_of(call.dt_bias, 1),
        call.states.stride(0),
        **call.constants,
        BLOCK=block,
        BLOCK_STATE=block_state,
        num_warps=4,
    )
    return out
