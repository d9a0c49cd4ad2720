"""`core::selective_state_update` in the form of Mamba, in one launch: a program moves some features of a head on.

Each number of a state decays by a factor of its own, so that no product of matrices is several tokens. The tokens of a
prompt are combined in pairs, pairs of these, and so on: y = a * x + b behind y = c * x + d is another of its kind.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.space_call import SpaceCall, strides_of
from core_cuda.ops.recurrent.states import block_of, exponential, results, rows_of, slot_of, softplus, within

_TOKENS = 16
"""Of a prompt, that a program combines at once."""
_NUMBERS = 4096
"""Of states after each token at once, in a program."""


@triton.jit
def _after(decay, added, later_decay, later_added):
    return decay * later_decay, added * later_decay + later_added


@triton.jit
def _features_kernel(
    x, dt, A, B, C, states, D, dt_bias, bounded, slots, kept, query_starts, out, x_row, x_head, dt_row, dt_head,
    dt_feature, A_head, A_feature, A_state, B_row, B_group, C_row, C_group, D_head, D_feature, bias_head, bias_feature,
    state_slot, HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, STATE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STATE: tl.constexpr, SOFTPLUS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK features of one head of one sequence, with their STATE numbers of state each, TOKENS at once."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    features = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    numbers, each = tl.arange(0, BLOCK_STATE), tl.arange(0, TOKENS)
    shown, own, group = features < FEATURES, numbers < STATE, head // GROUP
    offsets = head * (FEATURES * STATE) + features[:, None] * STATE + numbers[None, :]
    mask = shown[:, None] & own[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = rows_of(query_starts, sequence)
    state = tl.load(states + slot_of(slots, sequence) * state_slot + offsets, mask=mask, other=0.0).to(tl.float32)
    at = head * A_head + features[:, None] * A_feature + numbers[None, :] * A_state
    rates = tl.load(A + at, mask=mask, other=0.0).to(tl.float32)
    for first in range(begin, last, TOKENS):
        rows = first + each
        real = rows < last
        wide, seen = real[:, None] & own[None, :], real[:, None] & shown[None, :]
        keys = tl.load(B + rows[:, None] * B_row + group * B_group + numbers, mask=wide, other=0.0).to(tl.float32)
        queries = tl.load(C + rows[:, None] * C_row + group * C_group + numbers, mask=wide, other=0.0).to(tl.float32)
        token = tl.load(x + rows[:, None] * x_row + head * x_head + features, mask=seen, other=0.0).to(tl.float32)
        place = rows[:, None] * dt_row + head * dt_head + features[None, :] * dt_feature
        step = tl.load(dt + place, mask=seen, other=0.0).to(tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + head * bias_head + features * bias_feature, mask=shown, other=0.0)
            step += bias.to(tl.float32)[None, :]
        if SOFTPLUS:
            step = softplus(step)
        step = tl.where(seen, within(step, bounded, rows[:, None], real[:, None], LEAST, MOST), 0.0)
        decays = exponential(step[:, :, None] * rates[None, :, :])  # (TOKENS, BLOCK, BLOCK_STATE)
        moved = (step * token)[:, :, None] * keys[:, None, :]
        moved = tl.where((each == 0)[:, None, None], decays * state[None, :, :] + moved, moved)
        if TOKENS > 1:
            decays, moved = tl.associative_scan((decays, moved), 0, _after)
            state = tl.sum(tl.where((each == TOKENS - 1)[:, None, None], moved, 0.0), 0)
        else:
            state = tl.sum(moved, 0)
        result = tl.sum(moved * queries[:, None, :], 2)
        if D is not None:
            skip = tl.load(D + head * D_head + features * D_feature, mask=shown, other=0.0).to(tl.float32)
            result += token * skip[None, :]
        tl.store(out + (rows[:, None] * HEADS + head) * FEATURES + features, result, mask=seen)
    tl.store(states + slot_of(kept, sequence) * state_slot + offsets, state, mask=mask)


def along_features(call: SpaceCall) -> Tensor:
    """Do what the canonical op does."""
    (_, heads, features), count, out = call.x.shape, call.num_sequences, results(call.x, call.query_starts)
    block_state = triton.next_power_of_2(call.B.shape[2])
    tokens = 1 if call.query_starts is None else min(_TOKENS, max(_NUMBERS // block_state, 1))
    block = block_of(count * heads, features, most=max(_NUMBERS // (tokens * block_state), 1), least=1)
    strides = (*call.x.stride()[:2], *call.dt.stride(), *call.A.stride(), *call.B.stride()[:2], *call.C.stride()[:2])
    launching.launch(
        _features_kernel,
        (count * heads * triton.cdiv(features, block),),
        *call.tensors,
        out,
        *strides,
        *strides_of(call.D, 2),
        *strides_of(call.dt_bias, 2),
        call.states.stride(0),
        **call.constants,
        TOKENS=tokens,
        BLOCK=block,
        BLOCK_STATE=block_state,
        num_warps=4,
    )
    return out
