"""The kernel of paged prefill attention for compute capability 9: FlashAttention-3's division of labour, in Gluon.

Shah et al., FlashAttention-3, arXiv 2407.08608: one warp group fetches tiles of keys and values into shared memory, two
others multiply. Each of these starts the product of the next scores before it weighs the values of the last, so that
the matrix units work while it takes exponentials. Scores are kept in units of log2, for `exp2`.
"""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from core_cuda.ops.attention.hopper_fetch import fetch_tiles
from core_cuda.ops.attention.hopper_tiles import Buffers, all_here, find_tile, query_rows, row_layout
from core_cuda.ops.attention.online_softmax import first_seen
from core_cuda.ops.quantize import to_codes

_LOG2_E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-3.0e38)  # finite, so that a row that has seen nothing yet makes no NaN of inf - inf
_CONSUMERS = gl.constexpr(2)
_ROWS = gl.constexpr(64)  # of a consumer: those of one instruction of a warp group
_CONSUMER_REGISTERS = gl.constexpr(216)
_PRODUCER_REGISTERS = gl.constexpr(80)


@gluon.jit
def _scores(q, buffers, number, S: gl.constexpr, SPEC: gl.constexpr):
    """Start the product of queries and a tile of keys, once this is there."""
    stage = number % SPEC.stages
    mbarrier.wait(buffers.k_full.index(stage), number // SPEC.stages & 1)
    k = buffers.k.index(stage).reshape([SPEC.block_n, SPEC.block_d]).permute((1, 0))
    N: gl.constexpr = SPEC.block_n
    nothing = gl.zeros([_ROWS, N], gl.float32, S)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _sum(weights, acc, buffers, number, SPEC: gl.constexpr):
    """Start to add a tile of values, weighted, once this is there."""
    stage = number % SPEC.stages
    mbarrier.wait(buffers.v_full.index(stage), number // SPEC.stages & 1)
    v = buffers.v.index(stage).reshape([SPEC.block_n, SPEC.block_v])
    return warpgroup_mma(weights, v, acc, is_async=True)


@gluon.jit
def _release(barriers, number, SPEC: gl.constexpr):
    """Let the producer fill a stage anew that all warps have read."""
    all_here()
    mbarrier.arrive(barriers.index(number % SPEC.stages))


@gluon.jit
def _hidden(scores, i, tile, tokens, numbers, SPEC: gl.constexpr):
    """Return the scores of the i-th tile of a walk, those of keys that a query does not see as minus infinity."""
    N: gl.constexpr = SPEC.block_n
    is_cached = i < tile.cached
    start = gl.where(is_cached, tile.skipped_cached + i, tile.skipped_own + i - tile.cached) * N
    stop = gl.where(is_cached, tile.context, tile.new)
    ahead = gl.where(is_cached, tile.context, 0)  # of a token in the count of the tile's positions
    before = tile.context - ahead  # positions before that count begins
    edge = start + N > stop
    if SPEC.causal:
        edge = edge | (start + N > gl.min(tokens, 0) + ahead + 1)
    if SPEC.window:
        latest = first_seen(tile.context + gl.max(tokens, 0), numbers.window, SPEC.chunked)
        edge = edge | (before + start < latest)
    if edge:
        at = start + gl.arange(0, N, layout=gl.SliceLayout(0, scores.type.layout))
        seen = (at < stop)[None, :]
        if SPEC.causal:
            seen = seen & (at[None, :] <= (tokens + ahead)[:, None])
        if SPEC.window:
            sight = first_seen(tile.context + tokens, numbers.window, SPEC.chunked) - before
            seen = seen & (at[None, :] >= sight[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(scores, top, total, scale):
    """Take scores into (top, total): return the weights of values, both anew, and what shrinks what was summed."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _consume(part, tile, step, numbers, queries, buffers, SPEC: gl.constexpr):
    """Attend with one half of the tile's rows, and store the results."""
    queries = queries.index(part)
    _load_queries(queries, part, tile, step, numbers, SPEC)
    _store(_attend(queries, part, tile, step, numbers, buffers, SPEC), queries, part, tile, step, numbers, SPEC)


@gluon.jit
def _attend(q, part, tile, step, numbers, buffers, SPEC: gl.constexpr):
    """Return the attention of queries (64, D) to the tiles of a walk: (64, V) in fp32."""
    V: gl.constexpr = SPEC.block_v
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.block_n, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = step.query.dtype.element_ty
    tokens, heads, real = query_rows(tile, part * _ROWS + gl.arange(0, _ROWS, layout=BY_ROW), SPEC)
    top = gl.full([_ROWS], _LOWEST, gl.float32, BY_ROW)
    total = gl.zeros([_ROWS], gl.float32, BY_ROW)
    if step.sinks is not None:
        logits = gl.load(step.sinks + heads, mask=real, other=0.0).to(gl.float32) * _LOG2_E
        top = gl.maximum(logits, top)
        total = gl.exp2(logits - top)
    acc = gl.zeros([_ROWS, V], gl.float32, SUMS)

    first = tile.count * 0
    scores = warpgroup_mma_wait(0, deps=[_scores(q, buffers, first, SCORES, SPEC)])
    _release(buffers.k_free, first, SPEC)
    scores = _hidden(scores, 0, tile, tokens, numbers, SPEC)
    weights, top, total, _ = _weigh(scores, top, total, numbers.scale)
    weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
    for i in range(1, tile.count):
        pending = _scores(q, buffers, i, SCORES, SPEC)
        summed = _sum(weights, acc, buffers, i - 1, SPEC)
        scores = warpgroup_mma_wait(1, deps=[pending])
        _release(buffers.k_free, i, SPEC)
        scores = _hidden(scores, i, tile, tokens, numbers, SPEC)
        fresh, top, total, shrink = _weigh(scores, top, total, numbers.scale)
        acc = warpgroup_mma_wait(0, deps=[summed])
        _release(buffers.v_free, i - 1, SPEC)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(fresh.to(dtype), WEIGHTS)
    acc = warpgroup_mma_wait(0, deps=[_sum(weights, acc, buffers, tile.count - 1, SPEC)])
    _release(buffers.v_free, tile.count - 1, SPEC)
    return acc / gl.convert_layout(gl.where(total == 0, 1.0, total), gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _load_queries(target, part, tile, step, numbers, SPEC: gl.constexpr):
    """Bring one half of the tile's queries to shared memory."""
    layout: gl.constexpr = row_layout(SPEC.block_d)
    rows = part * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    tokens, heads, real = query_rows(tile, rows, SPEC)
    features = gl.arange(0, SPEC.block_d, layout=gl.SliceLayout(0, layout))
    places = (tile.base + tokens).to(gl.int64) * numbers.stride_query_t + heads * numbers.stride_query_h
    there = real[:, None] & (features < SPEC.d)[None, :]
    target.store(gl.load(step.query + places[:, None] + features[None, :], mask=there, other=0.0))
    fence_async_shared()
    all_here()


@gluon.jit
def _store(result, room, part, tile, step, numbers, SPEC: gl.constexpr):
    """Store results, or their codes, by way of the shared memory of the queries, in pieces of 16 bytes."""
    dtype: gl.constexpr = step.query.dtype.element_ty
    V: gl.constexpr = SPEC.block_v
    room = room._reinterpret(dtype, [_ROWS, V], gl.NVMMASharedLayout.get_default_for([_ROWS, V], dtype))
    room.store(result.to(dtype))
    all_here()
    layout: gl.constexpr = row_layout(V)
    result = room.load(layout)
    rows = part * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    tokens, heads, real = query_rows(tile, rows, SPEC)
    features = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    num_heads = gl.num_programs(0) // ((SPEC.group + SPEC.pack - 1) // SPEC.pack) * SPEC.group
    places = ((tile.base + tokens).to(gl.int64) * num_heads + heads) * numbers.stride_out_h
    if step.out_scale is not None:
        result = to_codes(result.to(gl.float32), gl.load(step.out_scale), step.out.dtype.element_ty)
    gl.store(
        step.out + places[:, None] + features[None, :], result, mask=real[:, None] & (features < SPEC.v)[None, :]
    )  # fmt: skip


@gluon.jit
def hopper_kernel(step, numbers, keys, values, SPEC: gl.constexpr, BLOCK_B: gl.constexpr):
    """Attend with tiles of rows: `pack` heads of one key/value head for each of some tokens of one sequence.

    Grid: (K * parts of a group of heads, tiles). keys, values: descriptors of the step's (K, T, D or V), loaded by
    (1, block_n, block_d or block_v). Rows of padding become 0.
    """
    if step.out_scale is not None:  # noqa: SIM102  # what is not there is no part of a tensor's condition
        if gl.program_id(0) + gl.program_id(1) == 0:
            gl.store(step.used_scale, gl.load(step.out_scale))
    tile = find_tile(step, numbers, SPEC, BLOCK_B)
    if not tile.live:
        return
    dtype: gl.constexpr = step.query.dtype.element_ty
    in_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, SPEC.block_d], dtype)
    queries = gl.allocate_shared_memory(dtype, [_CONSUMERS, _ROWS, SPEC.block_d], in_queries)
    stages: gl.constexpr = SPEC.stages
    in_barriers: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [stages, 1, SPEC.block_n, SPEC.block_d], keys.layout),
        gl.allocate_shared_memory(dtype, [stages, 1, SPEC.block_n, SPEC.block_v], values.layout),
        gl.allocate_shared_memory(gl.int64, [stages, 1], in_barriers),
        gl.allocate_shared_memory(gl.int64, [stages, 1], in_barriers),
        gl.allocate_shared_memory(gl.int64, [stages, 1], in_barriers),
        gl.allocate_shared_memory(gl.int64, [stages, 1], in_barriers),
    )
    for i in gl.static_range(stages):
        mbarrier.init(buffers.k_full.index(i), count=1)
        mbarrier.init(buffers.v_full.index(i), count=1)
        mbarrier.init(buffers.k_free.index(i), count=_CONSUMERS)
        mbarrier.init(buffers.v_free.index(i), count=_CONSUMERS)
    fence_async_shared()
    all_here()
    gl.warp_specialize(
        [
            (_consume, (0, tile, step, numbers, queries, buffers, SPEC)),
            (_consume, (1, tile, step, numbers, queries, buffers, SPEC)),
            (fetch_tiles, (tile, step, numbers, keys, values, buffers, SPEC)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
