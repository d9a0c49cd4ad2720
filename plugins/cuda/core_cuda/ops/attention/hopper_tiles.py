"""Which rows the kernel of compute capability 9 takes, and how they come into shared memory without descriptors."""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from core_cuda.ops.attention.online_softmax import first_seen

ROWS = 128
"""Rows of a program's tile."""
_ROWS = gl.constexpr(ROWS)

# Triton 3.6 has it by the first name, 3.7 by the second.
all_here: Any = getattr(gl, "thread_barrier", None) or gl.barrier
"""Wait for all warps of a warp group."""


class Buffers(NamedTuple):
    """Shared memory: tiles of keys and values by stage, and the barriers that say which are full and which free."""

    k: Any
    v: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


class Spec(NamedTuple):
    """What the kernel is compiled for: what a call asks for, sizes, and the tiles that it is cut into."""

    causal: bool
    window: bool
    chunked: bool
    #: query heads of a key/value head
    group: int
    #: of these, the query heads in a tile
    pack: int
    #: positions of a cache block
    page: int
    #: head sizes of query and key, and of value
    d: int
    v: int
    block_n: int
    block_d: int
    block_v: int
    #: tiles of keys, and of values, in shared memory
    stages: int
    #: whether another kernel serves the sequences that have one new token
    prompts_only: bool


class Step(NamedTuple):
    """Pointers to what a step's attention reads and writes, as in `core::attention`."""

    query: Any
    key: Any
    value: Any
    key_cache: Any
    value_cache: Any
    block_table: Any
    seq_lens: Any
    query_starts: Any
    sinks: Any
    out: Any
    out_scale: Any
    used_scale: Any


class Numbers(NamedTuple):
    """Sizes of a step and strides in elements; scale: of the scores, in units of log2."""

    num_tokens: Any
    num_seqs: Any
    scale: Any
    window: Any
    stride_query_t: Any
    stride_query_h: Any
    stride_key_t: Any
    stride_key_h: Any
    stride_value_t: Any
    stride_value_h: Any
    stride_key_slot: Any
    stride_key_head: Any
    stride_value_slot: Any
    stride_value_head: Any
    stride_table: Any
    stride_out_h: Any


class Tile(NamedTuple):
    """Queries that a program takes at once: `pack` heads from `member` on of tokens first to last of one sequence.

    live: whether there are any; base: the sequence's first row; new: its new tokens, context: those before; kv_head:
    that of its heads. Walks over `count` tiles of positions, 1 at least: `cached` of the context from skipped_cached
    on, then `own` of the new tokens from skipped_own on.
    """

    live: Any
    seq: Any
    base: Any
    new: Any
    context: Any
    first: Any
    last: Any
    kv_head: Any
    member: Any
    skipped_cached: Any
    cached: Any
    skipped_own: Any
    count: Any


@gluon.jit
def find_tile(step, numbers, SPEC: gl.constexpr, BLOCK_B: gl.constexpr):
    """Return this program's tile.

    Padding counts as one more sequence after the last: it has tokens, but neither keys nor a context.
    """
    TOKENS: gl.constexpr = _ROWS // SPEC.pack
    # Late tiles see the most keys: they go first.
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    # Sequence i's tiles are counted from starts[i] // TOKENS + i on: at least as many as it needs, and known without a
    # sum over the sequences before it.
    ids = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    starts = gl.load(step.query_starts + ids, mask=ids <= numbers.num_seqs, other=0).to(gl.int32)
    seq = gl.sum(((ids <= numbers.num_seqs) & (starts // TOKENS + ids <= tile)).to(gl.int32), 0) - 1
    base = gl.load(step.query_starts + seq).to(gl.int32)
    real = seq < numbers.num_seqs
    end = gl.load(step.query_starts + seq + 1, mask=real, other=0).to(gl.int32)
    num_rows = gl.where(real, end, numbers.num_tokens) - base
    new = gl.where(real, num_rows, 0)
    context = gl.maximum(gl.load(step.seq_lens + seq, mask=real, other=0).to(gl.int32) - new, 0)
    first = (tile - base // TOKENS - seq) * TOKENS
    last = gl.minimum(first + TOKENS, num_rows)
    live = first < last
    if SPEC.prompts_only:
        live = live & (new != 1)

    parts: gl.constexpr = (SPEC.group + SPEC.pack - 1) // SPEC.pack
    skipped_cached, skipped_own = 0, 0
    if SPEC.window:
        begin = gl.maximum(first_seen(context + first, numbers.window, SPEC.chunked), 0)
        skipped_cached = gl.minimum(begin, context) // SPEC.block_n
        skipped_own = gl.maximum(begin - context, 0) // SPEC.block_n
    cached = gl.cdiv(context, SPEC.block_n) - skipped_cached
    own = gl.cdiv(gl.minimum(last, new) if SPEC.causal else new, SPEC.block_n) - skipped_own
    return Tile(
        *(live, seq, base, new, context, first, last),
        *(gl.program_id(0) // parts, gl.program_id(0) % parts * SPEC.pack),
        *(skipped_cached, cached, skipped_own, gl.maximum(cached + own, 1)),
    )


@gluon.jit
def query_rows(tile, rows, SPEC: gl.constexpr):
    """Return the tokens and the heads of a tile's rows, and which of them there are."""
    tokens = tile.first + rows // SPEC.pack
    members = tile.member + rows % SPEC.pack
    return tokens, tile.kv_head * SPEC.group + members, (tokens < tile.last) & (members < SPEC.group)


@gluon.constexpr_function
def row_layout(size):
    """Return how a warp group shares out rows of so many elements of 2 bytes: 16 bytes at a time."""
    across = min(size // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
