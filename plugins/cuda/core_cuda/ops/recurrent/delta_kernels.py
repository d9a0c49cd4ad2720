"""The kernels of delta_chunks.py: the inverse of each chunk's equations, the states between chunks, and the results.

Shapes: C rows of a chunk, D features of a key, V of a value. A chunk has keys K (C, D), values, rates beta (C), and
sums of decays g (C) from its first row on; M (D, V) is the state before it. In order, with rows times a vector:

    T = (I + beta * tril(K K' * exp(g_i - g_j), -1))^-1 * beta    inverses (places, H, 3, C, C): parts of bf16
    missing = T (values - exp(g) * K M)                           missing (rows, H, V)
    M after it = exp(g_C) * M + K' (exp(g_C - g) * missing)       found (places, H, D, V): M before each chunk
    results = exp(g) * Q M + tril(Q K' * exp(g_i - g_j)) missing

T values and T exp(g) K are the U and W of arXiv 2406.06484, so that missing = U - W M. Neither is formed: the states
need all digits of fp32, and W has them in three parts of bf16, but K of bf16 in one.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.chunks import chunk_at, place_of
from core_cuda.ops.recurrent.parts import parts_of, product, product_of_parts
from core_cuda.ops.recurrent.states import exponential, rows_of, slot_of


@triton.jit
def _roots(squares, eps, NORMED: tl.constexpr):
    """Return what rows are multiplied by to be normed, from their sums of squares."""
    one = tl.full((squares.shape[0],), 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(squares + eps)) if NORMED else one


@triton.jit
def _squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _logs(decay, first, within, real, decay_row):
    """Return the logarithms of decays of rows first + within as fp64, 0 for rows that are not real. decay: of a head.

    A decay to zero, whose logarithm has no bound, stays one without hiding what decays after it.
    """
    logs = tl.load(decay + first * decay_row + within * decay_row, mask=real, other=0.0).to(tl.float32)
    return tl.maximum(logs, -1000.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float64)


@triton.jit
def _between(sums, later):
    """Return by what a state decays from each row (second dimension) to each later one (first), else 0. sums: fp64.

    Differences of sums in fp64 are as exact as sums of their own, and so are those of two parts in fp32.
    """
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(later, exponential(tl.where(later, apart, 0.0)), 0.0)


@triton.jit
def _joined(solved, system, rows, SIZE: tl.constexpr):
    """Return the inverse by blocks of 2 * SIZE rows from that by blocks of SIZE: below T1 and T2 comes -T2 A T1."""
    block = rows // SIZE
    below = (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)
    return solved - product(solved, product(tl.where(below, system, 0.0), solved, 3), 3)


@triton.jit
def _inverse(system, CHUNK: tl.constexpr):
    """Return (I + system)^-1 of system (CHUNK, CHUNK) fp32, whose numbers lie below the diagonal.

    By forward substitution: row by row in four blocks along the diagonal, all at once, then block by block.
    """
    size: tl.constexpr = CHUNK // 4
    blocks, each, rows = tl.arange(0, 4), tl.arange(0, size), tl.arange(0, CHUNK)
    own = blocks[:, None, None, None] == blocks[None, None, :, None]
    columns = tl.where(own, tl.reshape(tl.trans(system), (4, size, 4, size)), 0.0)
    columns = tl.sum(columns, 2)  # (4, size, size): transposed, so that a row is chosen along the last dimension
    found = tl.where(each[None, :, None] == each[None, None, :], 1.0, tl.zeros((4, size, size), tl.float32))
    for i in range(1, size):
        row = tl.sum(tl.where(each[None, None, :] == i, columns, 0.0), 2)
        moved = tl.sum(row[:, :, None] * found, 1)
        found = tl.where(each[None, :, None] == i, found - moved[:, None, :], found)
    wide = tl.broadcast_to(tl.expand_dims(found, 2), (4, size, 4, size))
    solved = tl.reshape(tl.where(own, wide, 0.0), (CHUNK, CHUNK))
    return _joined(_joined(solved, system, rows, size), system, rows, 2 * size)


@triton.jit(do_not_specialize=["num_sequences"])  # one kernel for all numbers of sequences
def delta_inverses_kernel(
    key, decay, beta, query_starts, inverses, weights, decays, key_row, key_head, decay_row, decay_head, beta_row,
    beta_head, num_sequences, eps, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr,
    BLOCK_KEY: tl.constexpr, CHUNK: tl.constexpr, NORMED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The inverse of the equations of one chunk of one head, its columns times beta; and what its rows weigh.

    weights (places, HEADS, 2, CHUNK): for each row what a key is multiplied by, of the state before and of the state
    after. decays (places, HEADS): by what the state decays along the chunk. fp32.
    """
    place, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    within = tl.arange(0, CHUNK)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = chunk_at(query_starts, place, num_sequences, CHUNK)
    if begin >= last:
        return
    real = within < (last - begin).to(tl.int32)
    key += begin * key_row + (head // GROUP) * key_head
    system, squares = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, KEY, BLOCK_KEY):
        features = start + tl.arange(0, BLOCK_KEY)
        mask = real[:, None] & (features < KEY)[None, :]
        k = tl.load(key + within[:, None] * key_row + features[None, :], mask=mask, other=0.0)
        system += product(k, tl.trans(k), 3)
        squares += _squares(k)
    roots = _roots(squares, eps, NORMED)
    rates = tl.load(beta + begin * beta_row + head * beta_head + within * beta_row, mask=real, other=0.0)
    rates = rates.to(tl.float32)
    logs = _logs(decay + head * decay_head, begin, within, real, decay_row)
    sums = tl.cumsum(logs, 0)
    between = _between(sums, within[:, None] > within[None, :])
    system *= between * (roots * rates)[:, None] * roots[None, :]
    base, passed = place * HEADS + head, tl.sum(logs, 0)
    weights += base * (2 * CHUNK) + within
    tl.store(weights, exponential(sums.to(tl.float32)) * roots)
    tl.store(weights + CHUNK, exponential((passed - sums).to(tl.float32)) * roots)
    tl.store(decays + base, exponential(passed.to(tl.float32)))
    inverses += base * (3 * CHUNK * CHUNK) + within[:, None] * CHUNK + within[None, :]
    parts = parts_of(_inverse(system, CHUNK) * rates[None, :], 3)
    for part in tl.static_range(3):
        tl.store(inverses + part * (CHUNK * CHUNK), parts[part])


@triton.jit
def delta_states_kernel(
    key, value, states, slots, kept, query_starts, inverses, weights, decays, found, missing, key_row, key_head,
    value_row, value_head, state_slot, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the state (KEY, VALUE) of one head along one sequence: what each chunk finds, and corrects."""
    blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    features, within = tl.arange(0, BLOCK_KEY), tl.arange(0, CHUNK)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    own, shown = features < KEY, columns < VALUE
    mask, offsets = own[:, None] & shown[None, :], features[:, None] * VALUE + columns[None, :]
    inner = within[:, None] * CHUNK + within[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = rows_of(query_starts, sequence)
    first_base = place_of(query_starts, sequence, CHUNK).to(tl.int64) * HEADS + head
    source = states + slot_of(slots, sequence) * state_slot + head * (KEY * VALUE)
    state = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    key += begin * key_row + (head // GROUP) * key_head
    value += begin * value_row + head * value_head
    missing += (begin * HEADS + head) * VALUE
    key_places = within[:, None] * key_row + features[None, :]
    value_places = within[:, None] * value_row + columns[None, :]
    places = within[:, None] * (HEADS * VALUE) + columns[None, :]
    for first in range(0, last - begin, CHUNK):
        base, real = first_base + first // CHUNK * HEADS, within < (last - begin - first).to(tl.int32)
        wide, narrow = real[:, None] & own[None, :], real[:, None] & shown[None, :]
        tl.store(found + base * (KEY * VALUE) + offsets, state, mask=mask)
        k = tl.load(key + first * key_row + key_places, mask=wide, other=0.0)
        v = tl.load(value + first * value_row + value_places, mask=narrow, other=0.0).to(tl.float32)
        of_chunk = inverses + base * (3 * CHUNK * CHUNK) + inner
        high, middle = tl.load(of_chunk), tl.load(of_chunk + CHUNK * CHUNK)
        inverse = high, middle, tl.load(of_chunk + 2 * CHUNK * CHUNK)
        faded, left = tl.load(weights + base * (2 * CHUNK) + within), tl.load(weights + (base * 2 + 1) * CHUNK + within)
        known = faded[:, None] * product(k, state, 3)
        lacking = product_of_parts(inverse, parts_of(v - known, 3), 3, 3, 3)
        tl.store(missing + first * (HEADS * VALUE) + places, lacking, mask=narrow)
        # Behind `where`, as in space_kernels.py, for a sum of its own.
        new = tl.where(mask, product(tl.trans(k), lacking * left[:, None], 3), 0.0)
        state = state * tl.load(decays + base) + new
    target = states + slot_of(kept, sequence) * state_slot + head * (KEY * VALUE)
    tl.store(target + offsets, state, mask=mask)


@triton.jit(do_not_specialize=["num_sequences"])  # one kernel for all numbers of sequences
def delta_outputs_kernel(
    query, key, decay, query_starts, found, missing, out, query_row, query_head, key_row, key_head, decay_row,
    decay_head, num_sequences, scale, eps, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The results of one chunk, for BLOCK columns of a head's values."""
    blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks % HEADS
    place = (tl.program_id(0) // (blocks * HEADS)).to(tl.int64)
    within = tl.arange(0, CHUNK)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    shown = columns < VALUE
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = chunk_at(query_starts, place, num_sequences, CHUNK)
    if begin >= last:
        return
    real = within < (last - begin).to(tl.int32)
    query += begin * query_row + (head // GROUP) * query_head
    key += begin * key_row + (head // GROUP) * key_head
    found += (place * HEADS + head) * (KEY * VALUE)
    scores, result = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, BLOCK), tl.float32)
    squares, key_squares = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, KEY, BLOCK_KEY):
        features = start + tl.arange(0, BLOCK_KEY)
        own = features < KEY
        mask = real[:, None] & own[None, :]
        q = tl.load(query + within[:, None] * query_row + features[None, :], mask=mask, other=0.0)
        k = tl.load(key + within[:, None] * key_row + features[None, :], mask=mask, other=0.0)
        mask = own[:, None] & shown[None, :]
        before = tl.load(found + features[:, None] * VALUE + columns[None, :], mask=mask, other=0.0)
        scores += product(q, tl.trans(k), 2)
        result += product(q, before, 2)
        squares += _squares(q)
        key_squares += _squares(k)
    sums = tl.cumsum(_logs(decay + head * decay_head, begin, within, real, decay_row), 0)
    roots = _roots(squares, eps, NORMED) * scale
    between = _between(sums, within[:, None] >= within[None, :])
    weights = scores * between * roots[:, None] * _roots(key_squares, eps, NORMED)[None, :]
    offsets = within[:, None] * (HEADS * VALUE) + columns[None, :]
    at, mask = (begin * HEADS + head) * VALUE, real[:, None] & shown[None, :]
    lacking = tl.load(missing + at + offsets, mask=mask, other=0.0)
    result = result * (exponential(sums.to(tl.float32)) * roots)[:, None] + product(weights, lacking, 2)
    tl.store(out + at + offsets, result, mask=mask)
