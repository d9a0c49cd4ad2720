"""The kernels of `core::attention` whose every row is computed in one order, whatever is in the step.

Positions are cut into segments at multiples of SEGMENT from the sequence's first one, and segments into tiles. Within a
segment the softmax runs online from nothing (Dao, FlashAttention-2, arXiv 2307.08691); segments are joined in their
order. Prompts and single tokens have the same tiles of rows and keys, so the same instructions of the matrix units;
keys come from the cache, which also holds this step's. What a row does not see of a tile changes no bit of it, and so
neither does which tiles a program skips for all of its rows.

A program takes all segments in turn, or some of them, which `join_kernel` then joins. Scores are in units of log2.
"""

# Triton reads annotations as types of its own.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from core_cuda.ops.attention.online_softmax import first_seen
from core_cuda.ops.attention.prefill_kernel import find_tile, load_rows, slots_of, tanh
from core_cuda.ops.cache_write import write_rows
from core_cuda.ops.launching import start_next, wait_for_inputs

_LOG2_E = tl.constexpr(1.4426950408889634)


class Form(NamedTuple):
    """What the kernels are compiled for; nothing in it depends on the step but `shared`."""

    window: bool
    #: whether the window begins anew at its multiples
    chunked: bool
    softcap: bool
    #: query heads of a key/value head
    group: int
    #: of these, the query heads in a tile
    pack: int
    #: positions of a cache block
    page: int
    #: features of query and key, and of value
    d: int
    v: int
    block_m: int
    block_n: int
    block_d: int
    block_v: int
    #: positions that are summed from nothing
    segment: int
    stages: int
    #: whether several programs share a sequence's segments
    shared: bool


@triton.jit
def _absorbed(top, total, acc, q, keys, values, table, start, low, stop, stride_k, stride_v, rows_at, scale, softcap,
              window, FORM: tl.constexpr):  # fmt: skip
    """Take the tile of positions from `start` on, of those from `low` to `stop`, into the running softmax of a segment.

    top (M,) the largest score, -inf for none; total (M,) the sum of weights; acc (M, V) that of values by weights.
    """
    N: tl.constexpr = FORM.block_n
    at = start + tl.arange(0, N)
    kept = (at >= low) & (at < stop)
    slots = slots_of(table, at, kept, True, FORM.page)
    k = load_rows(keys + slots * stride_k, kept, True, FORM.d, FORM.block_d)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if FORM.softcap:
        scores = softcap * tanh(scores)
    seen = kept[None, :] & (at[None, :] <= rows_at[:, None])
    if FORM.window:
        seen = seen & (at[None, :] >= first_seen(rows_at[:, None], window, FORM.chunked))
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = load_rows(values + slots * stride_v, kept, True, FORM.v, FORM.block_v)
    # Where a compiler may contract a product and a sum in two ways, fma says which: both kernels need the same.
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _joined(top, total, acc, other_top, other_total, other_acc):
    """Return the softmax of all earlier segments and that of the next one together, each (top, total, acc)."""
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, weight = tl.exp2(top - base), tl.exp2(other_top - base)
    total = tl.fma(other_total, weight, total * kept)
    acc = tl.fma(other_acc, tl.broadcast_to(weight[:, None], other_acc.shape), acc * kept[:, None])
    return higher, total, acc


@triton.jit
def _store(out, sinks, top, total, acc, places, heads, num_heads, real, FORM: tl.constexpr):
    """Divide by the softmax's denominator, sinks included, and write the rows that are real."""
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * _LOG2_E
        base = tl.maximum(top, logits)
        shrink = tl.exp2(top - base)
        total = tl.fma(total, shrink, tl.exp2(logits - base))
        acc = acc * shrink[:, None]
    result = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    write_rows(result, out + (places * num_heads + heads) * FORM.v, real, FORM.v, FORM.block_v)


@triton.jit
def _nothing(FORM: tl.constexpr):
    """Return the softmax of no position: (top, total, acc)."""
    M: tl.constexpr = FORM.block_m
    V: tl.constexpr = FORM.block_v
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, V), tl.float32)


@triton.jit
def _rows(query_starts, seq_lens, num_tokens, num_seqs, window, FORM: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return a program's rows: sequence, tokens of the step, heads, which are real, positions; then the first position
    that any of them sees, and one past the last. Padding sees none."""
    PARTS: tl.constexpr = (FORM.group + FORM.pack - 1) // FORM.pack
    seq, base, num_new, context, first, last = find_tile(
        query_starts, seq_lens, num_tokens, num_seqs, FORM.block_m // FORM.pack, BLOCK_B
    )  # fmt: skip
    M: tl.constexpr = FORM.block_m
    rows = tl.arange(0, M)
    tokens = first + rows // FORM.pack
    members = tl.program_id(0) % PARTS * FORM.pack + rows % FORM.pack
    heads = (tl.program_id(0) // PARTS).to(tl.int64) * FORM.group + members
    real = (tokens < last) & (members < FORM.group)
    low = 0
    if FORM.window:
        low = tl.maximum(first_seen(context + first, window, FORM.chunked), 0)
    stop = tl.where(first < last, context + tl.minimum(last, num_new), 0)
    return seq, (base + tokens).to(tl.int64), heads, real, context + tokens, low, stop


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "window"])
def alike_attention_kernel(
    query, key_cache, value_cache, block_table, seq_lens, query_starts, sinks, out, partial, num_tokens, num_seqs,
    scale, softcap, window, stride_query_t, stride_query_h, stride_key_slot, stride_key_head, stride_value_slot,
    stride_value_head, stride_table, FORM: tl.constexpr, BLOCK_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows: `pack` heads of one key/value head for each of some tokens of one sequence.

    Grid: (K * parts of a group of heads, tiles, programs that share segments). Arguments as in `core::attention`; out
    (T, H, V). shared: partial (segments from the first one seen, T, H, V + 2) gets total, top and acc of each.
    """
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    N: tl.constexpr = FORM.block_n
    SEGMENT: tl.constexpr = FORM.segment
    seq, places, heads, real, rows_at, low, stop = _rows(
        query_starts, seq_lens, num_tokens, num_seqs, window, FORM, BLOCK_B
    )  # fmt: skip
    PARTS: tl.constexpr = (FORM.group + FORM.pack - 1) // FORM.pack
    num_heads = tl.num_programs(0) // PARTS * FORM.group
    kv_head = (tl.program_id(0) // PARTS).to(tl.int64)
    keys, values = key_cache + kv_head * stride_key_head, value_cache + kv_head * stride_value_head
    table = block_table + seq.to(tl.int64) * stride_table
    q = load_rows(query + places * stride_query_t + heads * stride_query_h, real, True, FORM.d, FORM.block_d)
    first = low // SEGMENT
    if FORM.shared:
        for number in range(tl.program_id(2), tl.cdiv(stop, SEGMENT) - first, tl.num_programs(2)):
            begin = (first + number) * SEGMENT
            top, total, acc = _nothing(FORM)
            last = tl.minimum(begin + SEGMENT, stop)
            for start in tl.range(tl.maximum(begin, low // N * N), last, N, num_stages=FORM.stages):
                top, total, acc = _absorbed(
                    top, total, acc, q, keys, values, table, start, low, stop, stride_key_slot, stride_value_slot,
                    rows_at, scale, softcap, window, FORM,
                )  # fmt: skip
            kept = partial + ((number * num_tokens + places) * num_heads + heads) * (FORM.v + 2)
            tl.store(kept, total, mask=real)
            tl.store(kept + 1, top, mask=real)
            write_rows(acc, kept + 2, real, FORM.v, FORM.block_v)
    else:
        top, total, acc = _nothing(FORM)
        own_top, own_total, own = _nothing(FORM)
        for start in tl.range(low // N * N, stop, N, num_stages=FORM.stages):
            own_top, own_total, own = _absorbed(
                own_top, own_total, own, q, keys, values, table, start, low, stop, stride_key_slot,
                stride_value_slot, rows_at, scale, softcap, window, FORM,
            )  # fmt: skip
            if ((start + N) % SEGMENT == 0) | (start + N >= stop):
                top, total, acc = _joined(top, total, acc, own_top, own_total, own)
                own_top, own_total, own = _nothing(FORM)
        _store(out, sinks, top, total, acc, places, heads, num_heads, real, FORM)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "window"])
def join_kernel(
    seq_lens, query_starts, sinks, out, partial, num_tokens, num_seqs, window, FORM: tl.constexpr,
    BLOCK_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the segments that `alike_attention_kernel` left in `partial`, in their order, and write the rows of out."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    _, places, heads, real, _, low, stop = _rows(query_starts, seq_lens, num_tokens, num_seqs, window, FORM, BLOCK_B)
    PARTS: tl.constexpr = (FORM.group + FORM.pack - 1) // FORM.pack
    num_heads = tl.num_programs(0) // PARTS * FORM.group
    V: tl.constexpr = FORM.block_v
    v = tl.arange(0, V)
    inside = real[:, None] & (v < FORM.v)[None, :]
    top, total, acc = _nothing(FORM)
    for number in tl.range(0, tl.cdiv(stop, FORM.segment) - low // FORM.segment, loop_unroll_factor=2):
        kept = partial + ((number * num_tokens + places) * num_heads + heads) * (FORM.v + 2)
        own_total = tl.load(kept, mask=real, other=0.0)
        own_top = tl.load(kept + 1, mask=real, other=float("-inf"))
        own = tl.load((kept + 2)[:, None] + v[None, :], mask=inside, other=0.0)
        top, total, acc = _joined(top, total, acc, own_top, own_total, own)
    _store(out, sinks, top, total, acc, places, heads, num_heads, real, FORM)
