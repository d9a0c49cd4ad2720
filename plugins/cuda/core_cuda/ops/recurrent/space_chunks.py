"""`core::selective_state_update` on prompts in one launch: a program moves features of a head's state on by chunks,
by products of matrices (Dao, Gu, arXiv 2405.21060, section 6)."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent import chunks
from core_cuda.ops.recurrent.chunks import CHUNK, PRECISION, decays_between
from core_cuda.ops.recurrent.states import (
    exponential,
    num_sequences,
    places,
    results,
    rows_of,
    slot_of,
    softplus,
    within,
)

MAX_STATE = 128
"""Numbers of state of a feature at most: a program holds them for a chunk."""
_FEATURES = 32
"""Of a head, in a program."""


@triton.jit
def _chunks_kernel(
    x, dt, A, B, C, states, D, dt_bias, bounded, slots, kept, query_starts, out, x_row, x_head, dt_row, dt_head, B_row,
    B_group, C_row, C_group, A_head, D_head, bias_head, state_slot, HEADS: tl.constexpr, GROUP: tl.constexpr,
    FEATURES: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STATE: tl.constexpr,
    SOFTPLUS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK features of one head of one sequence, with their STATE numbers of state each."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    features = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    numbers, each = tl.arange(0, BLOCK_STATE), tl.arange(0, CHUNK)
    shown, own = features < FEATURES, numbers < STATE
    offsets = head * (FEATURES * STATE) + features[:, None] * STATE + numbers[None, :]
    mask = shown[:, None] & own[None, :]
    at = head // GROUP
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = rows_of(query_starts, sequence)
    state = tl.load(states + slot_of(slots, sequence) * state_slot + offsets, mask=mask, other=0.0).to(tl.float32)
    rate = tl.load(A + head * A_head).to(tl.float32)
    for first in range(begin, last, CHUNK):
        rows = first + each
        real = rows < last
        wide, shown_rows = real[:, None] & own[None, :], real[:, None] & shown[None, :]
        keys = tl.load(B + rows[:, None] * B_row + at * B_group + numbers, mask=wide, other=0.0).to(tl.float32)
        queries = tl.load(C + rows[:, None] * C_row + at * C_group + numbers, mask=wide, other=0.0).to(tl.float32)
        token = tl.load(x + rows[:, None] * x_row + head * x_head + features, mask=shown_rows, other=0.0)
        token = token.to(tl.float32)
        step = tl.load(dt + rows * dt_row + head * dt_head, mask=real, other=0.0).to(tl.float32)
        if dt_bias is not None:
            step += tl.load(dt_bias + head * bias_head).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step)
        step = tl.where(real, within(step, bounded, rows, real, LEAST, MOST), 0.0)
        logs, added = step * rate, token * step[:, None]
        between = decays_between(logs, CHUNK)
        to_end = tl.sum(tl.where(each[:, None] == CHUNK - 1, between, 0.0), 0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(scores, added, input_precision=PRECISION)
        faded = exponential(tl.cumsum(logs, 0))[:, None]
        result += faded * tl.dot(queries, tl.trans(state), input_precision=PRECISION)
        if D is not None:
            result += token * tl.load(D + head * D_head).to(tl.float32)
        tl.store(out + (rows[:, None] * HEADS + head) * FEATURES + features, result, mask=shown_rows)
        left = added * to_end[:, None]
        # Behind `where` the product is a sum of its own: the compiler would start it with the state, by whose size each
        # of its steps would round.
        new = tl.where(mask, tl.dot(tl.trans(left), keys, input_precision=PRECISION), 0.0)
        state = state * exponential(tl.sum(logs, 0)) + new
    tl.store(states + slot_of(kept, sequence) * state_slot + offsets, state, mask=mask)


def takes(B: Tensor) -> bool:
    """Return whether prompts are computed in chunks: rows enough to fill one."""
    return B.shape[0] >= CHUNK and B.shape[2] <= MAX_STATE


def in_chunks(
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
    query_starts: Tensor,
) -> Tensor:
    """Do what the canonical op does; x, B and C each with rows of one run."""
    rows, heads, features = x.shape
    count, out = num_sequences(rows, query_starts), results(x, query_starts)
    block = min(_FEATURES, chunks.block_of(features))
    given = x, dt, A, B, C, states, D, dt_bias, bounded, *places(slots, kept), query_starts.contiguous(), out
    strides = (*x.stride()[:2], *dt.stride(), *B.stride()[:2], *C.stride()[:2], A.stride(0))
    skips = 0 if D is None else D.stride(0), 0 if dt_bias is None else dt_bias.stride(0)
    launching.launch(
        _chunks_kernel,
        (count * heads * triton.cdiv(features, block),),
        *given,
        *strides,
        *skips,
        states.stride(0),
        HEADS=heads,
        GROUP=max(heads // max(B.shape[1], 1), 1),
        FEATURES=features,
        STATE=B.shape[2],
        BLOCK=block,
        BLOCK_STATE=chunks.block_of(B.shape[2]),
        SOFTPLUS=dt_softplus,
        LEAST=dt_min,
        MOST=dt_max,
        CHUNK=CHUNK,
        # On an H100 states of fp32 came to 1.3 times the numeric criterion's bound by products of three parts.
        PRECISION="ieee" if x.dtype == torch.float32 else PRECISION,
        num_warps=8,
        num_stages=1,
    )
    return out
