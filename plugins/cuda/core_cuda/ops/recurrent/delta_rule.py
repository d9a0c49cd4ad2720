"""`core::gated_delta_rule` in one launch: a program moves some columns of a head's state on, in registers."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.recurrent import GATED_DELTA_RULE
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent import delta_chunks
from core_cuda.ops.recurrent import states as common
from core_cuda.ops.recurrent.states import (
    block_of,
    exponential,
    group_of,
    in_one_run,
    in_rows,
    num_sequences,
    places,
    results,
    rows_of,
    slot_of,
)
from core_cuda.ops.registration import kernel_of

MAX_KEY = 512
"""Features of a key at most: a program holds a column of all of them."""


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call, or None."""
    size = call.args["key"].shape[-1]
    if size > MAX_KEY:
        return f"keys have {size} features, and the kernel takes up to {MAX_KEY}"
    return common.why_not(call)


@triton.jit
def _normed(x, eps, NORMED: tl.constexpr):
    # A root to the last digit: those of GPUs are two units off at once, of which a state keeps the sum.
    return tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) + eps) + tl.zeros_like(x)) if NORMED else x


@triton.jit
def _delta_kernel(
    query, key, value, decay, beta, states, slots, kept, query_starts, out, query_row, query_head, key_row, key_head,
    value_row, value_head, decay_row, decay_head, beta_row, beta_head, state_slot, scale, eps, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK: tl.constexpr,
    BY_FEATURE: tl.constexpr, NORMED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the state (KEY, VALUE) of one head of one sequence, token by token."""
    blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    features = tl.arange(0, BLOCK_KEY)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    own, shown = features < KEY, columns < VALUE
    offsets = head * (KEY * VALUE) + features[:, None] * VALUE + columns[None, :]
    mask = own[:, None] & shown[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first, last = rows_of(query_starts, sequence)
    state = tl.load(states + slot_of(slots, sequence) * state_slot + offsets, mask=mask, other=0.0).to(tl.float32)
    for row in range(first, last):
        q = tl.load(query + row * query_row + (head // GROUP) * query_head + features, mask=own, other=0.0)
        k = tl.load(key + row * key_row + (head // GROUP) * key_head + features, mask=own, other=0.0).to(tl.float32)
        v = tl.load(value + row * value_row + head * value_head + columns, mask=shown, other=0.0).to(tl.float32)
        q = _normed(q.to(tl.float32), eps, NORMED) * scale
        k = _normed(k, eps, NORMED)
        if BY_FEATURE:
            fading = tl.load(decay + row * decay_row + head * decay_head + features, mask=own, other=0.0)
            state *= exponential(fading.to(tl.float32))[:, None]
        else:
            state *= exponential(tl.load(decay + row * decay_row + head * decay_head).to(tl.float32))
        rate = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
        missing = (v - tl.sum(state * k[:, None], 0)) * rate
        state += k[:, None] * missing[None, :]
        tl.store(out + (row * HEADS + head) * VALUE + columns, tl.sum(state * q[:, None], 0), mask=shown)
    tl.store(states + slot_of(kept, sequence) * state_slot + offsets, state, mask=mask)


@kernel_of(GATED_DELTA_RULE)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    scale: float,
    norm_eps: float,
    slots: Tensor | None,
    kept: Tensor | None,
    query_starts: Tensor | None,
) -> Tensor:
    """Do what the canonical op does."""
    rows, heads, width = value.shape
    count = num_sequences(rows, query_starts)
    depth, by_feature = key.shape[2], decay.dim() == 3
    query, key, value = in_rows(query), in_rows(key), in_rows(value)
    if query_starts is not None and delta_chunks.why_not(query, key, value, decay, query_starts) is None:
        given = query, key, value, decay, beta, states, scale, norm_eps, slots, kept
        return delta_chunks.in_chunks(*given, query_starts)
    decay = in_rows(decay) if by_feature else decay
    out = results(value, query_starts)
    block_key = triton.next_power_of_2(depth)
    # 8,192 numbers of a state are 64 registers of each thread of 4 warps.
    block = block_of(count * heads, width, most=max(8192 // block_key, 8), least=8)
    launching.launch(
        _delta_kernel,
        (count * heads * triton.cdiv(width, block),),
        query,
        key,
        value,
        decay,
        beta,
        states,
        *places(slots, kept),
        in_one_run(query_starts),
        out,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *decay.stride()[:2],
        *beta.stride(),
        states.stride(0),
        scale,
        norm_eps,
        HEADS=heads,
        GROUP=group_of(heads, key.shape[1]),
        KEY=depth,
        VALUE=width,
        BLOCK_KEY=block_key,
        BLOCK=block,
        BY_FEATURE=by_feature,
        NORMED=norm_eps > 0,
        num_warps=4,
    )
    return out
