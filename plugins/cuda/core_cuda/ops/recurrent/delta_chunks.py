"""`core::gated_delta_rule` on prompts, in chunks: one launch for what each chunk computes of its own rows, and one that
moves states on from chunk to chunk.

What a row corrects depends on what the rows before it corrected. In a chunk that is a triangular system of equations,
whose inverse the first launch finds row by row (the UT transform of Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484).
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent import chunks
from core_cuda.ops.recurrent.chunks import CHUNK, PRECISION, decays_between, decays_to_end, place_of, sequence_at
from core_cuda.ops.recurrent.states import exponential, group_of, num_sequences, places, results, rows_of, slot_of

MAX_KEY = 256
"""Features of a key at most: a program holds them for a chunk."""
_COLUMNS = 32
"""Of a state, in a program."""


@triton.jit
def _roots(x, eps, NORMED: tl.constexpr):
    """Return what rows are multiplied by to be normed."""
    return tl.rsqrt(tl.sum(x * x, 1) + eps) if NORMED else tl.full((x.shape[0],), 1.0, tl.float32)


@triton.jit
def _rows_kernel(
    query, key, decay, beta, query_starts, solved, scores, query_row, query_head, key_row, key_head, decay_row,
    decay_head, beta_row, beta_head, sequences, scale, eps, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY: tl.constexpr, BLOCK_KEY: tl.constexpr, CHUNK: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the inverse of its equations, its columns times beta, and queries times keys, decayed."""
    place = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    sequence = sequence_at(query_starts, place, sequences, CHUNK)
    first, last = rows_of(query_starts, sequence)
    within = tl.arange(0, CHUNK)
    rows = first + (place - place_of(query_starts, sequence, CHUNK)) * CHUNK + within
    features = tl.arange(0, BLOCK_KEY)
    real = rows < last
    mask = real[:, None] & (features < KEY)[None, :]
    at = head // GROUP
    q = tl.load(query + rows[:, None] * query_row + at * query_head + features, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(key + rows[:, None] * key_row + at * key_head + features, mask=mask, other=0.0).to(tl.float32)
    k = k * _roots(k, eps, NORMED)[:, None]
    q = q * (_roots(q, eps, NORMED) * scale)[:, None]
    logs = tl.load(decay + rows * decay_row + head * decay_head, mask=real, other=0.0).to(tl.float32)
    rates = tl.load(beta + rows * beta_row + head * beta_head, mask=real, other=0.0).to(tl.float32)
    between = decays_between(logs, CHUNK)
    offsets = (place * HEADS + head) * (CHUNK * CHUNK) + within[:, None] * CHUNK + within[None, :]
    tl.store(scores + offsets, tl.dot(q, tl.trans(k), input_precision=PRECISION) * between)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * rates[:, None]
    found = tl.where(within[:, None] == within[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        here = within[:, None] == i
        row = tl.sum(tl.where(here & (within[None, :] < i), system, 0.0), 0)
        found = tl.where(here, found - tl.sum(row[:, None] * found, 0)[None, :], found)
    tl.store(solved + offsets, found * rates[None, :])


@triton.jit
def _states_kernel(
    query, key, value, decay, states, slots, kept, query_starts, solved, scores, out, query_row, query_head, key_row,
    key_head, value_row, value_head, decay_row, decay_head, state_slot, scale, eps, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the state (KEY, VALUE) of one head of one sequence, chunk by chunk."""
    blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    features, within = tl.arange(0, BLOCK_KEY), tl.arange(0, CHUNK)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    own, shown = features < KEY, columns < VALUE
    offsets = head * (KEY * VALUE) + features[:, None] * VALUE + columns[None, :]
    inner = within[:, None] * CHUNK + within[None, :]
    at = head // GROUP
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = rows_of(query_starts, sequence)
    place = place_of(query_starts, sequence, CHUNK).to(tl.int64)
    source = states + slot_of(slots, sequence) * state_slot
    state = tl.load(source + offsets, mask=own[:, None] & shown[None, :], other=0.0).to(tl.float32)
    for first in range(begin, last, CHUNK):
        rows = first + within
        real = rows < last
        mask = real[:, None] & own[None, :]
        q = tl.load(query + rows[:, None] * query_row + at * query_head + features, mask=mask, other=0.0)
        k = tl.load(key + rows[:, None] * key_row + at * key_head + features, mask=mask, other=0.0).to(tl.float32)
        q = q.to(tl.float32)
        shown_rows = real[:, None] & shown[None, :]
        v = tl.load(value + rows[:, None] * value_row + head * value_head + columns, mask=shown_rows, other=0.0)
        logs = tl.load(decay + rows * decay_row + head * decay_head, mask=real, other=0.0).to(tl.float32)
        faded, k_root = exponential(tl.cumsum(logs, 0)), _roots(k, eps, NORMED)
        chunk = (place * HEADS + head) * (CHUNK * CHUNK) + inner
        known = (faded * k_root)[:, None] * tl.dot(k, state, input_precision=PRECISION)
        missing = tl.dot(tl.load(solved + chunk), v.to(tl.float32) - known, input_precision=PRECISION)
        result = (faded * _roots(q, eps, NORMED) * scale)[:, None] * tl.dot(q, state, input_precision=PRECISION)
        result += tl.dot(tl.load(scores + chunk), missing, input_precision=PRECISION)
        tl.store(out + (rows[:, None] * HEADS + head) * VALUE + columns, result, mask=shown_rows)
        added = missing * (decays_to_end(logs, CHUNK) * k_root)[:, None]
        # Behind `where`, as in space_kernels.py, for a sum of its own.
        new = tl.where(own[:, None] & shown[None, :], tl.dot(tl.trans(k), added, input_precision=PRECISION), 0.0)
        state = state * exponential(tl.sum(logs, 0)) + new
        place += 1
    target = states + slot_of(kept, sequence) * state_slot
    tl.store(target + offsets, state, mask=own[:, None] & shown[None, :])


def takes(key: Tensor, decay: Tensor) -> bool:
    """Return whether prompts are computed in chunks: one decay of each head, and rows enough to fill a chunk.

    Before compute capability 9.0 the products take more registers than there are: there they are not.
    """
    return launching.capability() >= (9, 0) and decay.dim() == 2 and key.shape[0] >= CHUNK and key.shape[2] <= MAX_KEY


def in_chunks(
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
    query_starts: Tensor,
) -> Tensor:
    """Do what the canonical op does; query, key and value each with rows of one run."""
    rows, heads, width = value.shape
    count, starts = num_sequences(rows, query_starts), query_starts.contiguous()
    num_chunks = rows // CHUNK + count
    solved, scores = torch.empty((2, num_chunks, heads, CHUNK, CHUNK), dtype=torch.float32, device=value.device)
    out, block = results(value, query_starts), min(_COLUMNS, chunks.block_of(width))
    how = {
        "HEADS": heads,
        "GROUP": group_of(heads, key.shape[1]),
        "KEY": key.shape[2],
        "BLOCK_KEY": chunks.block_of(key.shape[2]),
        "CHUNK": CHUNK,
        "NORMED": norm_eps > 0,
        "PRECISION": PRECISION,
        "num_warps": 8,
    }
    inner = query, key, decay, beta, starts, solved, scores
    strides = (*query.stride()[:2], *key.stride()[:2])
    numbers = *strides, *decay.stride(), *beta.stride(), count, scale, norm_eps
    launching.launch(_rows_kernel, (num_chunks * heads,), *inner, *numbers, **how)
    given = query, key, value, decay, states, *places(slots, kept), starts, solved, scores, out
    numbers = *strides, *value.stride()[:2], *decay.stride(), states.stride(0), scale, norm_eps
    grid = (count * heads * triton.cdiv(width, block),)
    launching.launch(_states_kernel, grid, *given, *numbers, VALUE=width, BLOCK=block, num_stages=1, **how)
    return out
