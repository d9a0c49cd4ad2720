"""How tiles of keys and values come into shared memory, for the kernel of compute capability 9.

The step's own rows come by descriptors (TMA), rows of cached pages by asynchronous copies of 16 bytes, since they lie
where the block table says.
"""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from core_cuda.ops.attention.hopper_tiles import all_here, row_layout


@gluon.jit
def fetch_tiles(tile, step, numbers, keys, values, buffers, SPEC: gl.constexpr):
    """Fetch the tiles of keys and values of a walk, in the order in which they are taken."""
    _fetch_cached(tile, step, numbers, buffers, SPEC)
    for i in range(tile.cached, tile.count):
        _fetch_own(i, tile, step, numbers, keys, values, buffers, SPEC)


@gluon.jit
def _fetch_cached(tile, step, numbers, buffers, SPEC: gl.constexpr):
    """Fetch the tiles of the cached context: each is announced when the copies of the next are under way."""
    N: gl.constexpr = SPEC.block_n
    table = step.block_table + tile.seq.to(gl.int64) * numbers.stride_table
    keys = step.key_cache + tile.kv_head.to(gl.int64) * numbers.stride_key_head
    values = step.value_cache + tile.kv_head.to(gl.int64) * numbers.stride_value_head
    for i in range(tile.cached):
        stage, free = _place(i, SPEC)
        at = (tile.skipped_cached + i) * N + gl.arange(0, N, layout=gl.SliceLayout(1, row_layout(SPEC.block_d)))
        kept = at < tile.context
        slots = gl.load(table + at // SPEC.page, mask=kept, other=0).to(gl.int64) * SPEC.page + at % SPEC.page
        mbarrier.wait(buffers.k_free.index(stage), free)
        k = buffers.k.index(stage).reshape([N, SPEC.block_d])
        _copy_rows(k, keys + slots * numbers.stride_key_slot, kept, SPEC.d, SPEC.block_d)
        if i > 0:
            _landed(buffers.v_full.index((i - 1) % SPEC.stages), 1)
        mbarrier.wait(buffers.v_free.index(stage), free)
        layout: gl.constexpr = gl.SliceLayout(1, row_layout(SPEC.block_v))
        v = buffers.v.index(stage).reshape([N, SPEC.block_v])
        slots, kept = gl.convert_layout(slots, layout), gl.convert_layout(kept, layout)
        _copy_rows(v, values + slots * numbers.stride_value_slot, kept, SPEC.v, SPEC.block_v)
        _landed(buffers.k_full.index(stage), 1)
    if tile.cached > 0:
        _landed(buffers.v_full.index((tile.cached - 1) % SPEC.stages), 0)


@gluon.jit
def _fetch_own(i, tile, step, numbers, keys, values, buffers, SPEC: gl.constexpr):
    """Fetch the i-th tile of a walk, of the step's own rows."""
    N: gl.constexpr = SPEC.block_n
    stage, free = _place(i, SPEC)
    start = (tile.skipped_own + i - tile.cached) * N
    k, v = buffers.k.index(stage), buffers.v.index(stage)
    at = [tile.kv_head, tile.base + start, 0]
    if start + N <= tile.new:
        mbarrier.wait(buffers.k_free.index(stage), free)
        mbarrier.expect(buffers.k_full.index(stage), keys.block_type.nbytes)
        tma.async_copy_global_to_shared(keys, at, buffers.k_full.index(stage), k)
        mbarrier.wait(buffers.v_free.index(stage), free)
        mbarrier.expect(buffers.v_full.index(stage), values.block_type.nbytes)
        tma.async_copy_global_to_shared(values, at, buffers.v_full.index(stage), v)
    else:
        # Beyond a sequence's last token lie those of another: of them, not even a NaN may come in.
        head = tile.kv_head.to(gl.int64)
        rows = start + gl.arange(0, N, layout=gl.SliceLayout(1, row_layout(SPEC.block_d)))
        places = (tile.base + rows).to(gl.int64) * numbers.stride_key_t + head * numbers.stride_key_h
        mbarrier.wait(buffers.k_free.index(stage), free)
        _copy_rows(k.reshape([N, SPEC.block_d]), step.key + places, rows < tile.new, SPEC.d, SPEC.block_d)
        rows = start + gl.arange(0, N, layout=gl.SliceLayout(1, row_layout(SPEC.block_v)))
        places = (tile.base + rows).to(gl.int64) * numbers.stride_value_t + head * numbers.stride_value_h
        mbarrier.wait(buffers.v_free.index(stage), free)
        _copy_rows(v.reshape([N, SPEC.block_v]), step.value + places, rows < tile.new, SPEC.v, SPEC.block_v)
        _landed(buffers.k_full.index(stage), 1)
        _landed(buffers.v_full.index(stage), 0)


@gluon.jit
def _place(i, SPEC: gl.constexpr):
    """Return the stage of the i-th tile of a walk, and the phase of what frees it."""
    return i % SPEC.stages, i // SPEC.stages & 1 ^ 1


@gluon.jit
def _copy_rows(target, pointers, kept, SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """Begin to copy rows of SIZE to a tile (N, BLOCK); of those not `kept` nothing is read, and they become zeros."""
    features = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, row_layout(BLOCK)))
    there = kept[:, None] & (features < SIZE)[None, :]
    async_copy.async_copy_global_to_shared(target, pointers[:, None] + features[None, :], mask=there)
    async_copy.commit_group()


@gluon.jit
def _landed(barrier, LATER: gl.constexpr):
    """Tell a barrier that all copies but the LATER last ones are there, for matrix units to read."""
    async_copy.wait_group(LATER)
    fence_async_shared()
    all_here()
    mbarrier.arrive(barrier)
