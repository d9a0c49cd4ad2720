"""The kernels of space_chunks.py: what chunks add to a state, the states between chunks, and the results of chunks.

Half precision is multiplied by what is known in fp32. Both are split into parts of bf16, one for bf16, two for fp16,
three for fp32, and each part of one is multiplied by each of the other: three parts hold all digits of fp32, which
states need, two are enough for results that are rounded to half precision. Where an input is fp32, products are too.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.chunks import decays_between, place_of, sequence_at
from core_cuda.ops.recurrent.states import exponential, rows_of, slot_of, softplus, within


@triton.jit
def _parts(x):
    """Return three parts of bf16 whose sum is x: the largest first."""
    high = x.to(tl.bfloat16)
    rest = x.to(tl.float32) - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(left, right, PARTS: tl.constexpr):
    """Return left (M, K) times right (K, N), a sum of its own in fp32, from so many parts of what is fp32."""
    if left.dtype == tl.float32 and right.dtype == tl.float32:
        return tl.dot(left, right, input_precision="ieee")
    else:
        lefts, rights = _parts(left), _parts(right)
        num_lefts: tl.constexpr = 1 if left.dtype == tl.bfloat16 else 2 if left.dtype == tl.float16 else PARTS
        num_rights: tl.constexpr = 1 if right.dtype == tl.bfloat16 else 2 if right.dtype == tl.float16 else PARTS
        result = tl.zeros((left.shape[0], right.shape[1]), tl.float32)
        # The small products first: what they are rounded by is as small.
        for size in tl.static_range(PARTS):
            for part in tl.static_range(PARTS - size):
                if part < num_lefts and PARTS - 1 - size - part < num_rights:
                    result = tl.dot(lefts[part], rights[PARTS - 1 - size - part], result)
        return result


@triton.jit
def _chunk_at(query_starts, place, num_sequences, CHUNK: tl.constexpr):
    """Return the first row of the chunk at a place and the first after it; none lie between where it holds none."""
    sequence = sequence_at(query_starts, place, num_sequences, CHUNK)
    begin, last = rows_of(query_starts, sequence)
    begin += (place - place_of(query_starts, sequence, CHUNK)) * CHUNK
    return begin, tl.minimum(begin + CHUNK, last)


@triton.jit
def _steps(
    dt, bias, bounded, first, each, real, dt_row, SOFTPLUS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return the steps of rows first + each, 0 for those that are not real. dt: of one head."""
    step = tl.load(dt + first * dt_row + each * dt_row, mask=real, other=0.0).to(tl.float32) + bias
    if SOFTPLUS:
        step = softplus(step)
    return tl.where(real, within(step, bounded, first + each, real, LEAST, MOST), 0.0)


@triton.jit(do_not_specialize=["num_sequences"])  # one kernel for all numbers of sequences
def contributions_kernel(
    x, dt, A, B, dt_bias, bounded, query_starts, found, decays, x_row, x_head, dt_row, dt_head, B_row, B_group, A_head,
    bias_head, num_sequences, HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, STATE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_STATE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, OPERAND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What one chunk adds to BLOCK features of a head with BLOCK_STATE numbers each, and by what the state decays.

    found (chunks, HEADS, FEATURES, STATE) and decays (chunks, HEADS), fp32.
    """
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    widths: tl.constexpr = (STATE + BLOCK_STATE - 1) // BLOCK_STATE
    part, head = tl.program_id(0) % (blocks * widths), tl.program_id(0) // (blocks * widths) % HEADS
    place = (tl.program_id(0) // (blocks * widths * HEADS)).to(tl.int64)
    features = (part // widths) * BLOCK + tl.arange(0, BLOCK)
    numbers = (part % widths) * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
    each, shown, own = tl.arange(0, TILE), features < FEATURES, numbers < STATE
    mask = own[:, None] & shown[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = _chunk_at(query_starts, place, num_sequences, CHUNK)
    if begin >= last:
        return
    rate = tl.load(A + head * A_head).to(tl.float32)
    bias = tl.load(dt_bias + head * bias_head).to(tl.float32) if dt_bias is not None else 0.0
    dt, x, B = dt + head * dt_head, x + head * x_head, B + (head // GROUP) * B_group
    state, passed = tl.zeros((BLOCK_STATE, BLOCK), tl.float32), 0.0
    for first in range(begin, last, TILE):
        count = (last - first).to(tl.int32)
        real = each < count
        step = _steps(dt, bias, bounded, first, each, real, dt_row, SOFTPLUS, LEAST, MOST)
        # Sums from the last row backwards: what is far from the end has decayed, and may be rounded by more.
        behind = each + 1 < tl.minimum(count, TILE)
        after = _steps(dt, bias, bounded, first + 1, each, behind, dt_row, SOFTPLUS, LEAST, MOST)
        weights = step * exponential(tl.cumsum(after * rate, 0, reverse=True))
        inputs = real[:, None] & shown[None, :]
        token = tl.load(x + first * x_row + (each[:, None] * x_row + features[None, :]), mask=inputs, other=0.0)
        wide = real[:, None] & own[None, :]
        keys = tl.load(B + first * B_row + (each[:, None] * B_row + numbers[None, :]), mask=wide, other=0.0)
        new = _product(tl.trans(keys.to(OPERAND)), token.to(tl.float32) * weights[:, None], 3)
        logs = tl.sum(step * rate, 0)
        # Behind `where` the product is a sum of its own: the compiler would start it with the state, by whose size each
        # of its steps would round.
        state = state * exponential(logs) + tl.where(mask, new, 0.0)
        passed += logs
    base = place * HEADS + head
    offsets = numbers[:, None] + features[None, :] * STATE
    tl.store(found + base * (FEATURES * STATE) + offsets, state, mask=mask)
    if part == 0:
        tl.store(decays + base, exponential(passed))


@triton.jit
def passing_kernel(
    states, slots, kept, query_starts, found, decays, state_slot, HEADS: tl.constexpr, NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK of the NUMBERS of a head's state along one sequence: in found, what each chunk adds gives way to the state
    before it."""
    blocks: tl.constexpr = (NUMBERS + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (blocks * HEADS)
    head = tl.program_id(0) // blocks % HEADS
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = at < NUMBERS
    offsets = head * NUMBERS + at
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = rows_of(query_starts, sequence)
    chunks = (last - begin + CHUNK - 1) // CHUNK
    place = place_of(query_starts, sequence, CHUNK).to(tl.int64)
    found += place * (HEADS * NUMBERS) + offsets
    decays += place * HEADS + head
    state = tl.load(states + slot_of(slots, sequence) * state_slot + offsets, mask=mask, other=0.0).to(tl.float32)
    new = tl.load(found, mask=mask & (chunks > 0), other=0.0)
    for chunk in range(chunks):
        # Loaded before anything is stored, which it would otherwise wait for.
        coming = tl.load(found + HEADS * NUMBERS, mask=mask & (chunk + 1 < chunks), other=0.0)
        decay = tl.load(decays)
        tl.store(found, state, mask=mask)
        state = state * decay + new
        new = coming
        found += HEADS * NUMBERS
        decays += HEADS
    tl.store(states + slot_of(kept, sequence) * state_slot + offsets, state, mask=mask)


@triton.jit
def _scores(
    B, C, each, real, others, B_row, C_row, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return C of some rows times B of others, fp32. B, C: at the first of these, of one group."""
    result = tl.zeros((each.shape[0], each.shape[0]), tl.float32)
    for start in tl.static_range(0, STATE, BLOCK_STATE):
        numbers = start + tl.arange(0, BLOCK_STATE)
        own = numbers < STATE
        wide = real[:, None] & own[None, :]
        queries = tl.load(C + (each[:, None] * C_row + numbers[None, :]), mask=wide, other=0.0).to(OPERAND)
        wide = others[:, None] & own[None, :]
        keys = tl.load(B + (each[:, None] * B_row + numbers[None, :]), mask=wide, other=0.0).to(OPERAND)
        result = tl.dot(queries, tl.trans(keys), result, input_precision="ieee")
    return result


@triton.jit
def _from_state(
    C, before, each, real, features, C_row, FEATURES: tl.constexpr, STATE: tl.constexpr, BLOCK_STATE: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Return C of rows times a state, (rows, features) fp32. C: at the first row, of one group; before: of a head."""
    result = tl.zeros((features.shape[0], each.shape[0]), tl.float32)
    for start in tl.static_range(0, STATE, BLOCK_STATE):
        numbers = start + tl.arange(0, BLOCK_STATE)
        own = numbers < STATE
        wide = real[:, None] & own[None, :]
        queries = tl.load(C + (each[:, None] * C_row + numbers[None, :]), mask=wide, other=0.0).to(OPERAND)
        mask = (features < FEATURES)[:, None] & own[None, :]
        state = tl.load(before + (features[:, None] * STATE + numbers[None, :]), mask=mask, other=0.0)
        result += _product(state, tl.trans(queries), 2)
    return tl.trans(result)


@triton.jit(do_not_specialize=["num_sequences"])  # one kernel for all numbers of sequences
def outputs_kernel(
    x, dt, A, B, C, D, dt_bias, bounded, query_starts, found, out, x_row, x_head, dt_row, dt_head, B_row, B_group,
    C_row, C_group, A_head, D_head, bias_head, num_sequences, HEADS: tl.constexpr, GROUP: tl.constexpr,
    FEATURES: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STATE: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, OPERAND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The results of TILE rows of one chunk, for BLOCK features of a head; found holds the state before each chunk."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    tiles: tl.constexpr = CHUNK // TILE
    head = tl.program_id(0) // blocks % HEADS
    tile = tl.program_id(0) // (blocks * HEADS) % tiles
    place = (tl.program_id(0) // (blocks * HEADS * tiles)).to(tl.int64)
    features, each = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TILE)
    shown = features < FEATURES
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin, last = _chunk_at(query_starts, place, num_sequences, CHUNK)
    first = begin + tile * TILE
    if first >= last:
        return
    rate = tl.load(A + head * A_head).to(tl.float32)
    bias = tl.load(dt_bias + head * bias_head).to(tl.float32) if dt_bias is not None else 0.0
    dt, x, B, C = dt + head * dt_head, x + head * x_head, B + (head // GROUP) * B_group, C + (head // GROUP) * C_group
    real = each < (last - first).to(tl.int32)
    step = _steps(dt, bias, bounded, first, each, real, dt_row, SOFTPLUS, LEAST, MOST)
    faded = tl.cumsum(step * rate, 0)
    queries = C + first * C_row
    scores = _scores(B + first * B_row, queries, each, real, real, B_row, C_row, STATE, BLOCK_STATE, OPERAND)
    inputs, places = real[:, None] & shown[None, :], each[:, None] * x_row + features[None, :]
    token = tl.load(x + first * x_row + places, mask=inputs, other=0.0).to(OPERAND)
    if token.dtype == tl.float32:
        between = decays_between(step * rate, TILE)
    else:  # differences of sums round by more, though by less than results of half precision do
        apart = tl.minimum(faded[:, None] - faded[None, :], 0.0)
        between = tl.where(each[:, None] >= each[None, :], exponential(apart), 0.0)
    result = _product(scores * between * step[None, :], token, 2)
    if D is not None:
        result += token.to(tl.float32) * tl.load(D + head * D_head).to(tl.float32)
    every = each < TILE
    for back in range(tile):  # earlier rows of the chunk, the nearest first
        other = first - (back + 1) * TILE
        other_step = _steps(dt, bias, bounded, other, each, every, dt_row, SOFTPLUS, LEAST, MOST)
        after = _steps(dt, bias, bounded, other + 1, each, each + 1 < TILE, dt_row, SOFTPLUS, LEAST, MOST)
        left = tl.cumsum(after * rate, 0, reverse=True)
        keys = B + other * B_row
        weights = _scores(keys, queries, each, real, every, B_row, C_row, STATE, BLOCK_STATE, OPERAND)
        weights *= exponential(faded[:, None] + left[None, :]) * other_step[None, :]
        earlier = tl.load(x + other * x_row + places, mask=shown[None, :], other=0.0).to(OPERAND)
        result += _product(weights, earlier, 2)
        faded += tl.sum(other_step * rate, 0)
    before = found + (place * HEADS + head) * (FEATURES * STATE)
    known = _from_state(queries, before, each, real, features, C_row, FEATURES, STATE, BLOCK_STATE, OPERAND)
    result += exponential(faded)[:, None] * known
    offsets = each[:, None] * (HEADS * FEATURES) + features[None, :]
    tl.store(out + (first * HEADS + head) * FEATURES + offsets, result, mask=inputs)
