"""The kernel of paged prefill attention: FlashAttention-2's forward over a cached context and the step's own tokens.

Dao, FlashAttention-2, arXiv 2307.08691: a program keeps a tile of queries, walks over tiles of keys and values, and
rescales its result as the running maximum of the scores grows. Scores are kept in units of log2, for `exp2`.
"""
# Triton reads annotations as types of its own

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from core_cuda.ops.attention.online_softmax import first_seen
from core_cuda.ops.cache_write import write_rows
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.quantize import to_codes

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that a row that has seen nothing yet makes no NaN of inf - inf


class Spec(NamedTuple):
    """What the kernel is compiled for: what a call asks for, sizes, and the tiles that it is cut into."""

    causal: bool
    window: bool
    chunked: bool
    softcap: bool
    tma: bool
    #: query heads of a key/value head
    group: int
    #: of these, the query heads in a tile
    pack: int
    #: positions of a cache block
    page: int
    #: head size of query and key
    d: int
    #: features of a value that a program sums
    v: int
    block_m: int
    block_n: int
    block_d: int
    block_v: int
    #: of products
    precision: str
    #: of the loops' pipelines
    stages: int
    #: how far the scales of two heads lie apart, of a cache of codes
    k_scale: int = 0
    v_scale: int = 0
    #: whether another kernel serves the sequences that have one new token
    prompts_only: bool = False


@triton.jit
def tanh(x):
    """Return tanh in fp32 to a few units in the last place, also next to zero, where the quotient cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    series = 62.0 / 2835 + y * (-1382.0 / 155925 + y * (21844.0 / 6081075))
    near = x + x * y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * series)))
    return tl.where(y < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def _zones(low, visible, stop, num_seen, BLOCK_N: tl.constexpr):
    """Return where the walk from position `low` to `stop` begins, and from where to where tiles need no mask.

    Every query of the tile sees the positions from `visible` up to `num_seen`.
    """
    begin = tl.where(low < stop, low // BLOCK_N * BLOCK_N, stop)
    full_stop = tl.maximum(num_seen // BLOCK_N * BLOCK_N, begin)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(visible, BLOCK_N) * BLOCK_N, begin), full_stop)
    return begin, full_begin, full_stop


@triton.jit
def _own_rows(
    source, base, start, head, column, stride_t, kept, MASKED, TMA, SIZE, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Load this step's rows from base + start on of one head: (BLOCK_N, BLOCK), from feature `column` on if by TMA."""
    if TMA:
        rows = source.load([head, base + start, column]).reshape(BLOCK_N, BLOCK)
        if MASKED:
            rows = tl.where(kept[:, None], rows, 0.0)
        return rows
    else:
        first = source + (base + start).to(tl.int64) * stride_t
        return load_rows(first + tl.arange(0, BLOCK_N) * stride_t, kept, MASKED, SIZE, BLOCK)


@triton.jit
def load_rows(rows, kept, MASKED, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the rows (N, BLOCK) at these pointers (N,); if MASKED, those not `kept` are zero and not read."""
    features = tl.arange(0, BLOCK)
    at = rows[:, None] + features[None, :]
    # A mask that is not there costs nothing, and lets the loads be copies of 16 bytes whatever the sizes are.
    if MASKED and SIZE != BLOCK:
        return tl.load(at, mask=kept[:, None] & (features < SIZE)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=kept[:, None], other=0.0)
    elif SIZE != BLOCK:
        return tl.load(at, mask=(features < SIZE)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def slots_of(table, at, kept, MASKED, PAGE: tl.constexpr):
    """Return the slots of a sequence's positions."""
    blocks = tl.load(table + at // PAGE, mask=kept, other=0) if MASKED else tl.load(table + at // PAGE)
    return blocks.to(tl.int64) * PAGE + at % PAGE


@triton.jit
def _attend(
    state, q, keys, values, table, base, head, column, stride_k, stride_v, rows_at, sight, low, first, last, stop,
    scale, softcap, CACHED: tl.constexpr, MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Fold the tiles of key positions from `first` to `last` into the running (result, largest score, sum of weights).

    Positions count from the start of the cached context, or of the step's own tokens; rows_at are the queries' in the
    same count, and sight the first that each sees. No query sees positions below `low` or from `stop` on; they may hold
    anything, NaN included.
    """
    acc, top, total = state
    N: tl.constexpr = SPEC.block_n
    TMA: tl.constexpr = SPEC.tma and not CACHED
    for start in tl.range(first, last, N, num_stages=SPEC.stages):
        at = start + tl.arange(0, N)
        kept = (at >= low) & (at < stop)
        if CACHED:
            slots = slots_of(table, at, kept, MASKED, SPEC.page)
            k = load_rows(keys + slots * stride_k, kept, MASKED, SPEC.d, SPEC.block_d).to(q.dtype)
        else:
            # With TMA a tile also holds rows of other sequences. Masked scores hide any content of keys, even NaN, but
            # not of values.
            k = _own_rows(
                keys, base, start, head, 0, stride_k, kept, MASKED and not TMA, TMA, SPEC.d, N, SPEC.block_d
            )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=SPEC.precision)
        if SPEC.softcap:
            scores = softcap * tanh(scores * scale)
        if MASKED:
            seen = kept[None, :]
            if SPEC.causal and not CACHED:
                seen = seen & (at[None, :] <= rows_at[:, None])
            if SPEC.window:
                seen = seen & (at[None, :] >= sight[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        if SPEC.softcap:
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if CACHED:
            v = load_rows(values + slots * stride_v, kept, MASKED, SPEC.v, SPEC.block_v).to(q.dtype)
        else:
            v = _own_rows(values, base, start, head, column, stride_v, kept, MASKED, TMA, SPEC.v, N, SPEC.block_v)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=SPEC.precision)
        top = new_top
    return acc, top, total


@triton.jit
def _walk(
    state, q, keys, values, table, base, head, column, stride_k, stride_v, rows_at, row_first, row_last, before, stop,
    num_seen, scale, softcap, window, CACHED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Attend to one range of keys, of which every query of the tile sees the first num_seen, but for the window.

    row_first and row_last bound the queries' positions, as rows_at counts them; `before` lie before their count begins.
    Tiles at the edges are masked.
    """
    low, visible, sight = 0, 0, rows_at
    if SPEC.window:
        low = tl.maximum(first_seen(before + row_first, window, SPEC.chunked) - before, 0)
        visible = tl.maximum(first_seen(before + row_last - 1, window, SPEC.chunked) - before, 0)
        sight = first_seen(before + rows_at, window, SPEC.chunked) - before
    begin, full_begin, full_stop = _zones(low, visible, stop, num_seen, SPEC.block_n)
    for zone in tl.static_range(3):
        first = begin if zone == 0 else (full_begin if zone == 1 else full_stop)
        last = full_begin if zone == 0 else (full_stop if zone == 1 else stop)
        if SPEC.window or zone > 0:
            state = _attend(
                state, q, keys, values, table, base, head, column, stride_k, stride_v, rows_at, sight, low, first, last,
                stop, scale, softcap, CACHED, zone != 1, SPEC,
            )  # fmt: skip
    return state


@triton.jit
def find_tile(query_starts, seq_lens, num_tokens, num_seqs, TOKENS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return this program's tile: sequence, its first row in T, its new tokens and context, the tile's token bounds.

    Tokens count from the sequence's first one. A tile without tokens belongs to no sequence. Padding counts as one more
    sequence after the last: it has tokens, but neither keys nor a context.
    """
    # Late tiles see the most keys: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence i's tiles are counted from starts[i] // TOKENS + i on: at least as many as it needs, and known without a
    # sum over the sequences before it.
    ids = tl.arange(0, BLOCK_B)
    starts = tl.load(query_starts + ids, mask=ids <= num_seqs, other=0).to(tl.int32)
    seq = tl.sum(((ids <= num_seqs) & (starts // TOKENS + ids <= tile)).to(tl.int32), 0) - 1
    base = tl.load(query_starts + seq).to(tl.int32)
    is_padding = seq == num_seqs
    end = tl.load(query_starts + seq + 1, mask=seq < num_seqs, other=0).to(tl.int32)
    num_rows = tl.where(is_padding, num_tokens, end) - base
    first = (tile - base // TOKENS - seq) * TOKENS
    num_new = tl.where(is_padding, 0, num_rows)
    seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    return seq, base, num_new, tl.maximum(seq_len - num_new, 0), first, tl.minimum(first + TOKENS, num_rows)


@triton.jit
def prefill_kernel(
    query, keys, values, key_cache, value_cache, block_table, seq_lens, query_starts, sinks, out, k_scale, v_scale,
    out_scale, used_scale, num_tokens, num_seqs, scale, softcap, window, stride_query_t, stride_query_h, stride_key_t,
    stride_key_h, stride_value_t, stride_value_h, stride_key_slot, stride_key_head, stride_value_slot,
    stride_value_head, stride_table, stride_out_h, SPEC: tl.constexpr, BLOCK_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows: `pack` heads of one key/value head for each of some tokens of one sequence.

    Grid: (K * parts of a group of heads, tiles, parts of V). Arguments as in `core::attention`; keys and values are
    pointers to (T, K, D or V) or, with TMA, descriptors of (K, T, D or V). scale: of the scores, in units of log2, but
    with a soft-cap scale / softcap, where softcap is in units of log2. out: rows of H heads; those of padding become 0.
    k_scale, v_scale: None but for a cache of codes; keys and values hold codes then too, as numbers. out_scale: of the
    codes that out is to hold, None where it holds numbers; used_scale gets it.
    """
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if out_scale is not None:  # noqa: SIM102  # what is not there is no part of a tensor's condition
        if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
            tl.store(used_scale, tl.load(out_scale))
    PACK: tl.constexpr = SPEC.pack
    M: tl.constexpr = SPEC.block_m
    BLOCK_V: tl.constexpr = SPEC.block_v
    PARTS: tl.constexpr = (SPEC.group + PACK - 1) // PACK
    seq, base, num_new, context, first, last = find_tile(
        query_starts, seq_lens, num_tokens, num_seqs, SPEC.block_m // PACK, BLOCK_B
    )  # fmt: skip
    if first >= last:
        return
    if SPEC.prompts_only:  # noqa: SIM102  # one is known when the kernel is compiled, the other is not
        if num_new == 1:
            return

    kv_head = (tl.program_id(0) // PARTS).to(tl.int64)
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * SPEC.k_scale)
    rows = tl.arange(0, M)
    tokens = first + rows // PACK
    members = tl.program_id(0) % PARTS * PACK + rows % PACK
    heads = kv_head * SPEC.group + members
    real = (tokens < last) & (members < SPEC.group)
    places = (base + tokens).to(tl.int64)
    q = load_rows(query + places * stride_query_t + heads * stride_query_h, real, True, SPEC.d, SPEC.block_d)
    acc = tl.zeros((M, BLOCK_V), dtype=tl.float32)
    top = tl.full((M,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=members < SPEC.group, other=0.0).to(tl.float32) * _LOG2_E
        top = tl.maximum(logits, top)
        total = tl.exp2(logits - top)

    column = tl.program_id(2) * BLOCK_V
    table = block_table + seq.to(tl.int64) * stride_table
    key_cache += kv_head * stride_key_head
    value_cache += kv_head * stride_value_head + column
    state = _walk(
        (acc, top, total), q, key_cache, value_cache, table, 0, 0, 0, stride_key_slot, stride_value_slot,
        context + tokens, context + first, context + last, 0, context, context, scale, softcap, window, True, SPEC,
    )  # fmt: skip
    if not SPEC.tma:
        keys += kv_head * stride_key_h
        values += kv_head * stride_value_h + column
    stop = tl.minimum(last, num_new) if SPEC.causal else num_new
    num_seen = tl.minimum(first + 1, num_new) if SPEC.causal else num_new
    acc, top, total = _walk(
        state, q, keys, values, table, base, kv_head.to(tl.int32), column, stride_key_t, stride_value_t,
        tokens, first, last, context, stop, num_seen, scale, softcap, window, False, SPEC,
    )  # fmt: skip

    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale + kv_head * SPEC.v_scale)
    result = result.to(query.dtype.element_ty)
    if out_scale is not None:
        result = to_codes(result.to(tl.float32), tl.load(out_scale), out.dtype.element_ty)
    num_heads = tl.num_programs(0) // PARTS * SPEC.group
    write_rows(result, out + (places * num_heads + heads) * stride_out_h + column, real, SPEC.v, BLOCK_V)
