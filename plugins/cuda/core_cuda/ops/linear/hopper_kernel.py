"""The kernel of products with few rows for compute capability 9, in Gluon: the weight streams through shared memory.

A program has a multiprocessor for itself and fills its shared memory with tiles of the weight, by descriptors (TMA),
before it waits for the kernel before it: a weight does not depend on that. So the memory is busy while that kernel
ends, and the matrix units find what they need. Tiles of 64 columns of the result are the left operand, x the right one.
"""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from core_cuda.ops.activation import gate_product
from core_cuda.ops.launching import Early, start_next, wait_for_inputs
from core_cuda.ops.linear.hopper_shares import COLUMNS, all_here, begin_of, collect, fetch_x, leave

READ_EARLY = {
    "hopper_linear_kernel": {
        "weight": Early(
            "`lift_linear` and `fuse_gated_linear` take weights that are constants of the graph and that it does not "
            "write, and so does `quantized_linear_early`; other codes are only fetched into the L2 cache"
        )
    }
}
_COLUMNS = gl.constexpr(COLUMNS)
_NARROW = gl.constexpr(128)  # of K, whose products of fp8 the units sum in fewer bits than fp32 has


class Spec(NamedTuple):
    """What the kernel is compiled for; bits: of an element of x and weight."""

    block_m: int
    block_k: int
    stages: int
    splits: int
    bits: int
    gated: bool
    scaled: bool
    has_bias: bool


class Sizes(NamedTuple):
    """steps: tiles along K; first, second: where gate and up begin in the weight's rows; steps from scale to scale."""

    steps: Any
    tiles: Any
    first: Any
    second: Any
    x_step: Any
    w_step: Any


class Pointers(NamedTuple):
    """Pointers to what a product reads and writes beside x and weight; those that are not used may point anywhere."""

    bias: Any
    x_scale: Any
    w_scale: Any
    out: Any
    partial: Any
    arrived: Any


@gluon.jit
def _fetch_weight(number, step, weight, tiles, full, sizes, SPEC: gl.constexpr):
    """Begin to copy the number-th tile of a program, gate and up, into its stage."""
    stage = number % SPEC.stages
    X_BYTES: gl.constexpr = SPEC.block_m * SPEC.block_k * SPEC.bits // 8
    PARTS: gl.constexpr = 2 if SPEC.gated else 1
    mbarrier.expect(full.index(stage), weight.block_type.nbytes * PARTS + X_BYTES)
    row, column = step // sizes.steps * _COLUMNS, step % sizes.steps * SPEC.block_k
    to = tiles.index(stage * PARTS)
    tma.async_copy_global_to_shared(weight, [sizes.first + row, column], full.index(stage), to)
    if SPEC.gated:
        to = tiles.index(stage * PARTS + 1)
        tma.async_copy_global_to_shared(weight, [sizes.second + row, column], full.index(stage), to)


@gluon.jit
def _prefetch(begin, end, codes, offset, N, K, stride_w, sizes, SPEC: gl.constexpr):
    """Bring what the first stages will hold of a weight into the L2 cache, and wait for nothing.

    What a kernel before may still be writing can be fetched too: it is read after the wait.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = begin // sizes.steps * _COLUMNS + gl.arange(0, _COLUMNS, layout=layout)
    column = begin % sizes.steps * SPEC.block_k
    size = gl.minimum(gl.minimum(end - begin, SPEC.stages) * SPEC.block_k, K - column) * SPEC.bits // 8
    places = codes + (offset + gl.minimum(rows, N - 1)).to(gl.int64) * stride_w + column
    gl.inline_asm_elementwise(
        "{ .reg .u64 g; cvta.to.global.u64 g, $1; cp.async.bulk.prefetch.L2.global [g], $2; mov.u32 $0, 0; }",
        "=r,l,r", [places.to(gl.int64), gl.full([_COLUMNS], size, gl.int32, layout)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _multiply(tile, values, acc, SPEC: gl.constexpr):
    """Return acc plus the product of a tile and of x, of numbers still under way.

    The units sum products of fp8 in fewer bits than fp32 has, so each 128 of K are summed apart, and added while the
    next ones are under way.
    """
    if SPEC.bits > 8:
        acc = warpgroup_mma(tile, values.permute((1, 0)), acc, is_async=True)
    else:
        sums = _codes_product(tile, values, 0, acc)
        for chunk in gl.static_range(1, SPEC.block_k // _NARROW):
            following = _codes_product(tile, values, chunk, acc)
            acc += warpgroup_mma_wait(1, deps=[sums])
            sums = following
        acc += warpgroup_mma_wait(0, deps=[sums])
    return acc


@gluon.jit
def _codes_product(tile, values, chunk: gl.constexpr, like):
    left = tile.slice(chunk * _NARROW, _NARROW, dim=1)
    right = values.slice(chunk * _NARROW, _NARROW, dim=1)
    return warpgroup_mma(left, right.permute((1, 0)), gl.zeros_like(like), use_acc=False, is_async=True)


@gluon.jit
def _scaled(acc, offset, columns, rows, M, pointers, sizes, SPEC: gl.constexpr):
    """Return sums (64, block_m) times the scales of x and of the weight's rows from offset on, plus their bias."""
    if SPEC.scaled:
        acc = acc * gl.load(pointers.x_scale + gl.minimum(rows, M - 1) * sizes.x_step)[None, :]
        acc = acc * gl.load(pointers.w_scale + (offset + columns) * sizes.w_step)[:, None]
    if SPEC.has_bias:
        acc += gl.load(pointers.bias + offset + columns).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _store(
    acc, up, tile, M, N, stride_out, pointers, sizes,
    SPEC: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """Scale, gate, round and store the result of a tile."""
    layout: gl.constexpr = acc.type.layout
    columns = tile * _COLUMNS + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, layout))
    columns = gl.minimum(columns, N - 1)
    rows = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(0, layout))
    acc = _scaled(acc, sizes.first, columns, rows, M, pointers, sizes, SPEC)
    if SPEC.gated:
        up = _scaled(up, sizes.second, columns, rows, M, pointers, sizes, SPEC)
        acc = gate_product(acc, up, LIMIT, KIND, LIMIT > 0.0, UP_OFFSET)
    # Neighbouring columns, which lie side by side in the result, to one thread.
    by_column: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    result = gl.convert_layout(acc.to(pointers.out.dtype.element_ty), by_column)
    columns = tile * _COLUMNS + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, by_column))
    rows = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(0, by_column))
    places = pointers.out + rows.to(gl.int64)[None, :] * stride_out + columns[:, None]
    gl.store(places, result, mask=(columns < N)[:, None] & (rows < M)[None, :])


@gluon.jit(do_not_specialize=["M", "sizes"])  # compile one kernel for all numbers of rows, and for most weights
def hopper_linear_kernel(
    weight, x, codes, pointers, M, N, K, stride_w, stride_out, sizes,
    SPEC: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """All rows of x times 64 columns (of gate and of up): over one of `splits` shares of K, or several tiles over all.

    weight, x: descriptors, loaded by (64, block_k) and (block_m, block_k); codes: the weight again, where a kernel
    before may still be writing it.
    """
    STAGES: gl.constexpr = SPEC.stages
    PARTS: gl.constexpr = 2 if SPEC.gated else 1
    ROWS: gl.constexpr = SPEC.block_m
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // SPEC.bits])
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS, _COLUMNS, SPEC.block_k], weight.layout)
    values = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, SPEC.block_k], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    all_here()
    programs = gl.num_programs(0)
    number = programs - 1 - gl.program_id(0)  # of two programs of a tile, the one that waits is launched later
    shares = sizes.tiles * SPEC.splits
    begin = begin_of(number * shares // programs, sizes, SPEC)
    end = begin_of((number + 1) * shares // programs, sizes, SPEC)
    if codes is None:
        for i in gl.static_range(STAGES):
            if begin + i < end:
                _fetch_weight(i, begin + i, weight, tiles, full, sizes, SPEC)
    elif OVERLAP:
        _prefetch(begin, end, codes, sizes.first, N, K, stride_w, sizes, SPEC)
        if SPEC.gated:
            _prefetch(begin, end, codes, sizes.second, N, K, stride_w, sizes, SPEC)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    for i in gl.static_range(STAGES):
        if begin + i < end:
            if codes is not None:
                _fetch_weight(i, begin + i, weight, tiles, full, sizes, SPEC)
            fetch_x(i, begin + i, x, values, full, sizes, SPEC)

    zeros = gl.zeros([_COLUMNS, ROWS], gl.float32, layout)
    at = begin
    while at < end:
        tile = at // sizes.steps
        stop = gl.minimum(end, (tile + 1) * sizes.steps)
        acc, up = zeros, zeros
        for step in range(at, stop):
            place = step - begin
            stage = place % STAGES
            mbarrier.wait(full.index(stage), place // STAGES & 1)
            acc = _multiply(tiles.index(stage * PARTS), values.index(stage), acc, SPEC)
            if SPEC.gated:
                up = _multiply(tiles.index(stage * PARTS + 1), values.index(stage), up, SPEC)
            if SPEC.bits > 8:
                if SPEC.gated:
                    acc, up = warpgroup_mma_wait(0, deps=[acc, up])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
            all_here()  # all warps must have read the stage before it is filled anew
            if step + STAGES < end:
                _fetch_weight(place + STAGES, step + STAGES, weight, tiles, full, sizes, SPEC)
                fetch_x(place + STAGES, step + STAGES, x, values, full, sizes, SPEC)
        is_first = True
        if SPEC.splits > 1:
            is_first = number % SPEC.splits == 0
            if is_first:
                acc, up = collect(acc, up, number, pointers, SPEC)
            else:
                leave(acc, up, number, pointers, SPEC)
        if is_first:
            _store(acc, up, tile, M, N, stride_out, pointers, sizes, SPEC, KIND, LIMIT, UP_OFFSET)
        at = stop
