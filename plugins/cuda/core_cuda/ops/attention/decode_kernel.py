"""The kernel of paged attention for few new tokens per sequence: split keys, grouped heads, cache write included.

A program serves one sequence, one key/value head and one share of the sequence's cached positions (decode_plan.py), for
all query heads of the group and all new tokens at once: they are the rows of its tile, so that keys and values are read
once. Shares are joined by their log-sum-exp (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023), by whichever program
of a sequence and head comes last, in the order of the shares. Within a share the softmax runs online (Dao et al., arXiv
2205.14135).

This step's keys and values come from the operands, never from the cache: the program of the last share takes them in,
and writes them to the cache. Scores are powers of two: log2(e) is part of their scale. A cache of codes is read as
numbers; the scale of keys is part of that of the scores, and the scale of values is left for the end.
"""

# Triton reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.attention.decode_plan import MOST_PARTS, bounds, extent, planned, read_lengths
from core_cuda.ops.attention.online_softmax import LOG2_E, absorbed, first_seen, joined, narrowed
from core_cuda.ops.attention.rotation import rotated_rows
from core_cuda.ops.cache_write import codes_of
from core_cuda.ops.launching import Early, fetch, start_next, wait_for_inputs
from core_cuda.ops.quantize import to_codes

_LENGTHS = Early("the plan is made of them, and made again if they are read otherwise", guess=True, confirmed=True)
_TABLE = Early("where the first tiles of the program's share lie, which are fetched", guess=True)
READ_EARLY = {"decode_kernel": {"seq_lens": _LENGTHS, "query_starts": _LENGTHS, "block_table": _TABLE}}


@triton.jit
def inside(rows, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mask of a tile whose rows are masked, and its columns where the tile is wider than they are."""
    mask = rows[:, None]
    if SIZE != BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return mask


@triton.jit
def fetch_rows(rows, SIZE: tl.constexpr):
    """Fetch rows of SIZE features into the L2 cache, and wait for nothing."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(SIZE, LINE))
    columns = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)
    fetch(rows[:, None] + columns[None, :])


@triton.jit
def copied(rows, COPIES: tl.constexpr):
    """Return rows (R, D) as (R * COPIES, D), each of them as often side by side.

    A product on the matrix units wants more rows than there mostly are; so what comes before it is done once for each.
    """
    if COPIES == 1:
        return rows
    else:
        R: tl.constexpr = rows.shape[0]
        D: tl.constexpr = rows.shape[1]
        return tl.reshape(tl.broadcast_to(rows[:, None, :], (R, COPIES, D)), (R * COPIES, D))


@triton.jit
def finish(out, sinks, v_scale, out_scale, head, first, num_new, top, total, acc, GROUP: tl.constexpr,
           V: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """Divide by the softmax's denominator, sinks included, and write the rows of the new tokens.

    top, total (BLOCK,), acc (BLOCK, BLOCK_V): each row COPIES times, see `copied`.

    v_scale: pointer to this head's scale of values, or None. out_scale: of the codes that are written, or None; values
    are rounded to DTYPE before they become codes.
    """
    rows, v = tl.arange(0, BLOCK) // COPIES, tl.arange(0, BLOCK_V)
    steps, heads = rows // GROUP, head * GROUP + rows % GROUP
    written = (steps < num_new) & (tl.arange(0, BLOCK) % COPIES == 0)
    if SINKS:
        logits = tl.load(sinks + heads, mask=steps < num_new, other=0.0).to(tl.float32) * LOG2_E
        base = tl.maximum(top, logits)
        kept = tl.exp2(top - base)
        total = total * kept + tl.exp2(logits - base)
        acc = acc * kept[:, None]
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    if out_scale is not None:
        result = to_codes(result.to(DTYPE).to(tl.float32), tl.load(out_scale), out.dtype.element_ty)
    tokens = (first + steps).to(tl.int64)
    places = out + (tokens * (tl.num_programs(0) * GROUP) + heads)[:, None] * V + v[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=inside(written, v, V, BLOCK_V))


@triton.jit
def zero_padding(out, real, num_tokens, head, program, GROUP: tl.constexpr, V: tl.constexpr,
                 BLOCK_GROUP: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Write zero to this head's rows of the padding tokens, of which each program takes its share."""
    rows, v = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_V)
    for token in range(real + program, num_tokens, tl.num_programs(1)):
        heads = tl.cast(token, tl.int64) * (tl.num_programs(0) * GROUP) + head * GROUP + rows
        zeros = tl.zeros((BLOCK_GROUP, BLOCK_V), out.dtype.element_ty)
        tl.store(out + heads[:, None] * V + v[None, :], zeros, mask=inside(rows < GROUP, v, V, BLOCK_V))


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_blocks", "table_width", "table_stride"])
def decode_kernel(
    query, key, value, key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts,
    sinks, query_weight, key_weight, cos, sin, out, partial, stats, counters, k_scale, v_scale, out_scale, used_scale,
    num_tokens, num_seqs, num_blocks, table_width, join_ratio, scale, window, eps, offset,
    query_stride, query_head, key_stride, key_head, value_stride, value_head,
    key_block, key_slot, key_cache_head, value_block, value_slot, value_cache_head,
    table_stride, cos_stride, sin_stride,
    D: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, MAX_NEW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    COPIES: tl.constexpr, BLOCK_NEW: tl.constexpr, NEW_COPIES: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PARTS: tl.constexpr, SHARED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROTATION: tl.constexpr, FETCH: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, AMONG_PROMPTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Serve (key/value head, program); the first ten arguments are those of `core::attention`.

    The strides are those of tokens, heads, blocks and positions in a block. MAX_NEW: most new tokens of a sequence.
    COPIES, NEW_COPIES: of query rows and of new keys and values in products, see `copied`.
    SHARED: whether there are more programs than sequences, so that several serve one; join_ratio: see decode_plan.py.
    ROTATION: how query and key are normed and rotated on the way (`Rotation`), by the tables and weights. FETCH: tiles
    that are fetched into the L2 cache while the kernel before this one still runs. What that reads is a guess, since
    the kernel may just be writing it: it is read again. k_scale, v_scale: of a cache of codes, None for 1; K_SCALE and
    V_SCALE apart for two heads. out_scale: of the codes that out is to hold, None where it holds numbers; used_scale
    gets it. AMONG_PROMPTS: whether the step has prompts, which another kernel serves: it also writes the cache, the
    rows of padding and used_scale.
    """
    head, program = tl.program_id(0), tl.program_id(1)
    BLOCK_M: tl.constexpr = BLOCK_ROWS * COPIES
    k_head, v_head = key_cache + head.to(tl.int64) * key_cache_head, value_cache + head.to(tl.int64) * value_cache_head
    CODES: tl.constexpr = key_cache.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = query.dtype.element_ty
    # fp16 holds every code, and hardware turns codes into fp16 alone: on the way to bfloat16 each takes three steps.
    WIDE: tl.constexpr = tl.float16 if CODES and DTYPE.is_bf16() else DTYPE
    if v_scale is not None:
        v_scale += head * V_SCALE
    helpers = tl.num_programs(1) - num_seqs
    seqs = tl.arange(0, BLOCK_B)
    seq, share, num_shares, size, parts_before = program, 0, 1, 0, 0
    if SHARED and OVERLAP:  # planned while the kernel before still runs: it holds if the lengths turn out the same
        guessed, guessed_last, guessed_length = read_lengths(seq_lens, query_starts, seqs, num_seqs, ".cg")
        seq, share, num_shares, size, parts_before = planned(
            guessed, guessed_last, guessed_length, program, num_seqs, window, helpers, join_ratio, MAX_NEW, WINDOWED,
            CHUNKED, AMONG_PROMPTS, BLOCK_N, BLOCK_B)  # fmt: skip
    if FETCH > 0 and OVERLAP:
        first, last, length = read_lengths(seq_lens, query_starts, seq, num_seqs, ".cg")
        _, num_old, start = extent(first, last, length, window, MAX_NEW, WINDOWED, CHUNKED, AMONG_PROMPTS)
        start, end = bounds(start, num_old, share, size, SHARED)
        fetched = start + tl.arange(0, FETCH * BLOCK_N)
        known = (seq < num_seqs) & (fetched >= 0) & (fetched < tl.minimum(end, table_width * PAGE))
        table = block_table + seq * table_stride
        guess = tl.load(table + fetched // PAGE, mask=known, other=0, cache_modifier=".cg")
        guess = tl.where((guess >= 0) & (guess < num_blocks), guess, 0).to(tl.int64)
        offset_in = tl.where(known, fetched % PAGE, 0)
        fetch_rows(k_head + guess * key_block + offset_in * key_slot, D)
        fetch_rows(v_head + guess * value_block + offset_in * value_slot, V)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if k_scale is not None:  # read after the wait, since a graph may compute it
        k_scale = tl.load(k_scale + head * K_SCALE)
        scale *= k_scale
    if SHARED:
        firsts, lasts, lengths = read_lengths(seq_lens, query_starts, seqs, num_seqs, "")
        settled = False
        if OVERLAP:
            other = (firsts != guessed) | (lasts != guessed_last) | (lengths != guessed_length)
            settled = tl.max(other.to(tl.int32), 0) == 0
        if not settled:
            seq, share, num_shares, size, parts_before = planned(
                firsts, lasts, lengths, program, num_seqs, window, helpers, join_ratio, MAX_NEW, WINDOWED, CHUNKED,
                AMONG_PROMPTS, BLOCK_N, BLOCK_B)  # fmt: skip
    first, last, length = read_lengths(seq_lens, query_starts, seq, num_seqs, "")
    num_new, num_old, start = extent(first, last, length, window, MAX_NEW, WINDOWED, CHUNKED, AMONG_PROMPTS)
    start, end = bounds(start, num_old, share, size, SHARED)
    if not AMONG_PROMPTS:
        real = tl.load(query_starts + num_seqs).to(tl.int32)
        zero_padding(out, real, num_tokens, head, program, GROUP, V, BLOCK_GROUP, BLOCK_V)
        if out_scale is not None:  # noqa: SIM102  # what is not there is no part of a tensor's condition
            if head + program == 0:
                tl.store(used_scale, tl.load(out_scale))
    if num_new > 0:
        table = block_table + seq * table_stride
        positions = start + tl.arange(0, BLOCK_N)
        # Block numbers are read a tile ahead: within a tile, the loads behind them could not be pipelined. The first of
        # them come before the query, whose rotation waits for memory meanwhile.
        blocks = tl.load(table + positions // PAGE, mask=positions < end, other=0)
        d, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        rows = tl.arange(0, BLOCK_ROWS)
        tokens, heads = (first + rows // GROUP).to(tl.int64), head * GROUP + rows % GROUP
        q_rows, live = query + tokens * query_stride + heads * query_head, rows // GROUP < num_new
        if ROTATION.size == 0:
            q = tl.load(q_rows[:, None] + d[None, :], mask=inside(live, d, D, BLOCK_D), other=0.0)
        else:
            q = rotated_rows(q_rows, live, cos + tokens * cos_stride, sin + tokens * sin_stride, query_weight,
                             eps, offset, D, BLOCK_D, ROTATION)  # fmt: skip
        q = copied(q, COPIES)
        steps = tl.arange(0, BLOCK_M) // COPIES // GROUP
        if WINDOWED:
            sight = first_seen(num_old + steps, window, CHUNKED)
        factor = scale
        if WIDE != DTYPE:
            q, sizes = narrowed(q, WIDE)
            factor = scale * sizes[:, None]

        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        if share == num_shares - 1:
            new = tl.arange(0, BLOCK_NEW)
            there = new < num_new
            new_tokens = (first + new).to(tl.int64)
            k_rows = key + new_tokens * key_stride + head * key_head
            k_mask, v_mask = inside(there, d, D, BLOCK_D), inside(there, v_columns, V, BLOCK_V)
            if ROTATION.size == 0:
                k = tl.load(k_rows[:, None] + d[None, :], mask=k_mask, other=0.0)
            else:
                k = rotated_rows(k_rows, there, cos + new_tokens * cos_stride, sin + new_tokens * sin_stride,
                                 key_weight, eps, offset, D, BLOCK_D, ROTATION)  # fmt: skip
            v_rows = value + new_tokens * value_stride + head * value_head
            v = tl.load(v_rows[:, None] + v_columns[None, :], mask=v_mask, other=0.0)
            if not AMONG_PROMPTS:
                slots = tl.load(slot_mapping + new_tokens, mask=there, other=0)
                k_slots = k_head + slots // PAGE * key_block + slots % PAGE * key_slot
                v_slots = v_head + slots // PAGE * value_block + slots % PAGE * value_slot
            if CODES and not AMONG_PROMPTS:  # if the cache was written before, these values are already rounded
                k_codes, k = codes_of(k.to(tl.float32), k_scale, key_cache.dtype.element_ty)
                v = v.to(tl.float32)
                if v_scale is None:
                    v_codes, v = codes_of(v, None, value_cache.dtype.element_ty)
                else:
                    v_codes, v = codes_of(v, tl.load(v_scale), value_cache.dtype.element_ty)
                tl.store(k_slots[:, None] + d[None, :], k_codes, mask=k_mask)
                tl.store(v_slots[:, None] + v_columns[None, :], v_codes, mask=v_mask)
            elif not AMONG_PROMPTS:
                tl.store(k_slots[:, None] + d[None, :], k, mask=k_mask)
                tl.store(v_slots[:, None] + v_columns[None, :], v, mask=v_mask)
            if CODES:
                k, v = k.to(WIDE), v.to(WIDE)
            k, v = copied(k, NEW_COPIES), copied(v, NEW_COPIES)
            new = tl.arange(0, BLOCK_NEW * NEW_COPIES) // NEW_COPIES
            only = tl.arange(0, BLOCK_NEW * NEW_COPIES) % NEW_COPIES == 0
            visible = (only & (new < num_new))[None, :] & (new[None, :] <= steps[:, None])
            if WINDOWED:
                visible = visible & ((num_old + new)[None, :] >= sight[:, None])
            top, total, acc = absorbed(q, k, v, visible, top, total, acc, factor, SOFTCAP)

        for tile in range(start, end, BLOCK_N):
            positions = tile + tl.arange(0, BLOCK_N)
            there = positions < end
            block, in_block = blocks.to(tl.int64), positions % PAGE
            blocks = tl.load(table + (positions + BLOCK_N) // PAGE, mask=positions + BLOCK_N < end, other=0)
            k_places = k_head + (block * key_block + in_block * key_slot)[:, None] + d[None, :]
            k = tl.load(k_places, mask=inside(there, d, D, BLOCK_D), other=0.0)
            v_places = v_head + (block * value_block + in_block * value_slot)[:, None] + v_columns[None, :]
            v = tl.load(v_places, mask=inside(there, v_columns, V, BLOCK_V), other=0.0)
            if CODES:
                k, v = k.to(WIDE), v.to(WIDE)
            visible = there[None, :]
            if WINDOWED:
                visible = visible & (positions[None, :] >= sight[:, None])
            top, total, acc = absorbed(q, k, v, visible, top, total, acc, factor, SOFTCAP)

        if num_shares == 1:
            finish(out, sinks, v_scale, out_scale, head, first, num_new, top, total, acc, GROUP, V, BLOCK_M, COPIES,
                   BLOCK_V, SINKS, DTYPE)  # fmt: skip
        else:
            ROWS: tl.constexpr = MAX_NEW * GROUP
            pair = seq * tl.num_programs(0) + head
            part = head * (helpers * MOST_PARTS) + parts_before
            places, stat_places = partial + part.to(tl.int64) * (ROWS * V), stats + part * (2 * ROWS)
            row = tl.arange(0, BLOCK_M) // COPIES
            written = (steps < num_new) & (tl.arange(0, BLOCK_M) % COPIES == 0)
            own = places + ((share * ROWS + row) * V)[:, None] + v_columns[None, :]
            tl.store(own, acc, mask=inside(written, v_columns, V, BLOCK_V))
            tl.store(stat_places + share * 2 * ROWS + row, top, mask=written)
            tl.store(stat_places + share * 2 * ROWS + ROWS + row, total, mask=written)
            tl.debug_barrier()  # all threads must have written their part before the arrival is counted
            if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == num_shares - 1:
                tl.debug_barrier()
                whole_top, whole_total, whole = joined(places, stat_places, num_shares, num_new * GROUP, PARTS, ROWS,
                                                       V, BLOCK_ROWS, BLOCK_V)  # fmt: skip
                finish(out, sinks, v_scale, out_scale, head, first, num_new, whole_top, whole_total, whole, GROUP, V,
                       BLOCK_ROWS, 1, BLOCK_V, SINKS, DTYPE)  # fmt: skip
                tl.store(counters + pair, 0)  # reset for the next launch
