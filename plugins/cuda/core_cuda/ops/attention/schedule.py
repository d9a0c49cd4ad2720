"""What a step's lengths make of a plan of FlashInfer's attention, written on the device, within a captured graph.

`plan()` runs on the host and wants all lengths, which a captured step knows on the device alone. So it is called once,
for the bounds of a bucket: it lays out the memory and fixes the grid. The kernels here then write into that memory what
`plan()` would have written for the lengths of the step. `planning.py` holds what lies where.

All index tensors that FlashInfer reads are int32. Sequences beyond the real ones have no tokens, and a length of 0.
"""

# Triton reads annotations as types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs


@triton.jit
def _starts(query_starts, at, num_seqs):
    """Return the first tokens of sequences `at`; of those beyond the last, the number of real tokens."""
    return tl.load(query_starts + tl.minimum(at, num_seqs)).to(tl.int32)


@triton.jit
def _write_lengths(seq_lens, query_starts, qo_indptr, last_page, num_seqs, num_entries, capacity,
                   BLOCK_B: tl.constexpr):  # fmt: skip
    """Write where sequences begin and how long they are.

    FlashInfer has `(pages - 1) * page + last_page` for a length, and all sequences own a whole row of the table here,
    of `capacity` positions and a page. So last_page is negative for short ones; the sum is right for all of them.
    """
    at = tl.arange(0, BLOCK_B)
    tl.store(qo_indptr + at, _starts(query_starts, at, num_seqs), mask=at < num_entries)
    lengths = tl.load(seq_lens + at, mask=at < num_seqs, other=0).to(tl.int32)
    tl.store(last_page + at, lengths - capacity, mask=at < num_seqs)


@triton.jit
def _copy_table(block_table, stride, indices, num_seqs, width, BLOCK: tl.constexpr):
    """Copy this program's share of the block table (B, M) to indices (B * M,)."""
    total = num_seqs * width
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < total
        sequence = (at // width).to(tl.int64)
        tl.store(indices + at, tl.load(block_table + sequence * stride + at % width, mask=inside, other=0), mask=inside)


@triton.jit
def _tile_ends(query_starts, num_seqs, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return for each sequence how many tiles of TILE rows there are up to its end; a token has GROUP rows."""
    at = tl.arange(0, BLOCK_B)
    new = _starts(query_starts, at + 1, num_seqs) - _starts(query_starts, at, num_seqs)
    return tl.cumsum((new * GROUP + TILE - 1) // TILE, 0)


@triton.jit
def _owner(tile, ends, num_seqs, BLOCK_B: tl.constexpr):
    """Return the sequence that each tile is of, num_seqs for none, and the tiles before that sequence."""
    at = tl.arange(0, BLOCK_B)
    passed = (ends[None, :] <= tile[:, None]) & (at < num_seqs)[None, :]
    return tl.sum(passed.to(tl.int32), 1), tl.max(tl.where(passed, ends[None, :], 0), 1)


@triton.jit
def tiles_kernel(
    seq_lens, query_starts, block_table, table_stride, qo_indptr, last_page, indices,
    requests, tiles, chunks, first_rows, total_rows,
    num_seqs, num_tiles, width, capacity,
    GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the schedule of FlashAttention 2 without splits: which tile of which sequence each program takes.

    requests, tiles, chunks (num_tiles,); first_rows, qo_indptr (B + 2,); total_rows (1,). Programs beyond the last tile
    get sequence B, which has no tokens and no pages.
    """
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    ends = _tile_ends(query_starts, num_seqs, GROUP, TILE, BLOCK_B)
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sequence, before = _owner(tile, ends, num_seqs, BLOCK_B)
    inside = tile < num_tiles
    tl.store(requests + tile, sequence, mask=inside)
    tl.store(tiles + tile, tl.where(sequence < num_seqs, tile - before, 0), mask=inside)
    tl.store(chunks + tile, tl.zeros_like(tile), mask=inside)
    if tl.program_id(0) == 0:
        _write_lengths(seq_lens, query_starts, qo_indptr, last_page, num_seqs, num_seqs + 2, capacity, BLOCK_B)
        at = tl.arange(0, BLOCK_B)
        tl.store(first_rows + at, _starts(query_starts, at, num_seqs), mask=at < num_seqs + 2)
        tl.store(total_rows, tl.load(query_starts + num_seqs).to(tl.int32))
    _copy_table(block_table, table_stride, indices, num_seqs, width, 256)


@triton.jit
def chunks_kernel(
    seq_lens, query_starts, block_table, table_stride, qo_indptr, last_page, indices,
    first_rows, total_rows, chunk_size,
    num_seqs, width, capacity,
    CHUNKS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write what lengths change of FlashAttention 2's schedule for one token a sequence, in CHUNKS parts each.

    first_rows (B + 1,): the first of a sequence's partial results; total_rows and chunk_size (1,). A part has the same
    size for all sequences: the longest has CHUNKS of them, and parts beyond a sequence's end come out empty.
    """
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if tl.program_id(0) == 0:
        _write_lengths(seq_lens, query_starts, qo_indptr, last_page, num_seqs, num_seqs + 1, capacity, BLOCK_B)
        at = tl.arange(0, BLOCK_B)
        tl.store(first_rows + at, _starts(query_starts, at, num_seqs) * CHUNKS, mask=at < num_seqs + 1)
        tl.store(total_rows, tl.load(query_starts + num_seqs).to(tl.int32))
        longest = tl.max(tl.load(seq_lens + at, mask=at < num_seqs, other=0).to(tl.int32), 0)
        if WINDOW > 0:
            longest = tl.minimum(longest, WINDOW)
        tl.store(chunk_size, tl.maximum((longest + CHUNKS - 1) // CHUNKS, LEAST))
    _copy_table(block_table, table_stride, indices, num_seqs, width, 256)


@triton.jit
def works_kernel(
    seq_lens, query_starts, block_table, table_stride, qo_indptr, last_page, indices,
    tiles, first_tokens, first_pages, new_tokens, lengths, heads, work_indptr, sequences,
    num_seqs, most_works, num_programs, width, capacity,
    HEADS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the schedule of FlashAttention 3: the works (head, tile) of each of its persistent programs.

    All but work_indptr (num_programs + 1,) are (most_works,). Works are dealt out in turn from the last tile on, all
    heads of a tile one after the other: later tiles of a prompt attend to more positions, and heads of one group read
    the same ones. Those of a program lie side by side.
    """
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    ends = _tile_ends(query_starts, num_seqs, 1, TILE, BLOCK_B)
    total = tl.max(ends, 0)
    each, more = total * HEADS // num_programs, total * HEADS % num_programs
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    early = place < more * (each + 1)  # of programs that have one work more
    late = place - more * (each + 1)
    size = tl.maximum(each, 1)
    program = tl.where(early, place // (each + 1), more + late // size)
    turn = tl.where(early, place % (each + 1), late % size)
    work = turn * num_programs + program
    tile = tl.maximum(total - 1 - work // HEADS, 0)
    sequence, before = _owner(tile, ends, num_seqs, BLOCK_B)
    first = _starts(query_starts, sequence, num_seqs)
    inside = place < tl.minimum(total * HEADS, most_works)
    tl.store(tiles + place, tile - before, mask=inside)
    tl.store(first_tokens + place, first, mask=inside)
    tl.store(first_pages + place, sequence * width, mask=inside)
    tl.store(new_tokens + place, _starts(query_starts, sequence + 1, num_seqs) - first, mask=inside)
    own = tl.load(seq_lens + sequence, mask=inside & (sequence < num_seqs), other=0).to(tl.int32)
    tl.store(lengths + place, own, mask=inside)
    tl.store(heads + place, work % HEADS, mask=inside)
    tl.store(sequences + place, sequence, mask=inside)
    if tl.program_id(0) == 0:
        _write_lengths(seq_lens, query_starts, qo_indptr, last_page, num_seqs, num_seqs + 1, capacity, BLOCK_B)
        at = tl.arange(0, BLOCK_P)
        tl.store(work_indptr + at, at * each + tl.minimum(at, more), mask=at <= num_programs)
    _copy_table(block_table, table_stride, indices, num_seqs, width, 256)
