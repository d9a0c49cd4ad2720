"""The kernel of products with weights of codes for few rows at compute capability 9, in Gluon.

Codes stream through shared memory as in hopper_kernel.py, and become numbers in registers (hopper_codes.py). Sums over
the codes of one scale are kept apart, as products of a batch, and multiplied by it in fp32: numbers are integers, or
those of fp8, and exact.
"""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from core_cuda.ops.launching import Early, start_next, wait_for_inputs
from core_cuda.ops.linear.hopper_codes import numbers_of, values_of
from core_cuda.ops.linear.hopper_shares import COLUMNS, all_here, begin_of, collect, fetch_x, leave

_CONSTANT = Early("`weight_only_linear_early` takes weights that are constants of the graph and that it does not write")
READ_EARLY = {"hopper_coded_kernel": {"codes": _CONSTANT, "scales": _CONSTANT}}
_COLUMNS = gl.constexpr(COLUMNS)


class Spec(NamedTuple):
    """What the kernel is compiled for; sub: neighbours along K, in a tile, of one scale."""

    block_m: int
    block_k: int
    sub: int
    stages: int
    splits: int
    bits: int
    fp8: bool
    has_zero: bool
    has_bias: bool
    gated: bool = False


class Sizes(NamedTuple):
    """steps: tiles along K; group: neighbours along K of one scale, of which a row has `groups`."""

    steps: Any
    tiles: Any
    group: Any
    groups: Any


class Pointers(NamedTuple):
    """Pointers to what a product reads and writes beside x and codes; those that are not used may point anywhere."""

    bias: Any
    zeros: Any
    out: Any
    partial: Any
    arrived: Any


@gluon.jit
def _fetch_codes(number, step, codes, tiles, full, sizes, SPEC: gl.constexpr):
    """Begin to copy the number-th tile of a program into its stage."""
    stage = number % SPEC.stages
    X_BYTES: gl.constexpr = SPEC.block_m * SPEC.block_k * 2
    WIDTH: gl.constexpr = codes.block_type.shape[1]
    mbarrier.expect(full.index(stage), codes.block_type.nbytes + X_BYTES)
    at = [step // sizes.steps * _COLUMNS, step % sizes.steps * WIDTH]
    tma.async_copy_global_to_shared(codes, at, full.index(stage), tiles.index(stage))


@gluon.jit
def _per_part(source, step, N, stride, sizes, layout: gl.constexpr, SPEC: gl.constexpr):
    """Return what the source (N, groups) has for the parts of a tile: (parts, 64)."""
    PARTS: gl.constexpr = SPEC.block_k // SPEC.sub
    parts = gl.arange(0, PARTS, layout=gl.SliceLayout(1, layout)) * SPEC.sub
    rows = step // sizes.steps * _COLUMNS + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, layout))
    groups = gl.minimum((step % sizes.steps * SPEC.block_k + parts) // sizes.group, sizes.groups - 1)
    return gl.load(source + gl.minimum(rows, N - 1).to(gl.int64)[None, :] * stride + groups[:, None])


@gluon.jit
def _store(acc, tile, M, N, stride_out, pointers, SPEC: gl.constexpr):
    """Round and store the result of a tile."""
    layout: gl.constexpr = acc.type.layout
    columns = tile * _COLUMNS + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(0, layout))
    if SPEC.has_bias:
        acc += gl.load(pointers.bias + gl.minimum(columns, N - 1)).to(gl.float32)[:, None]
    places = pointers.out + rows.to(gl.int64)[None, :] * stride_out + columns[:, None]
    gl.store(places, acc.to(pointers.out.dtype.element_ty), mask=(columns < N)[:, None] & (rows < M)[None, :])


@gluon.jit(do_not_specialize=["M", "sizes"])  # compile one kernel for all numbers of rows, and for most weights
def hopper_coded_kernel(
    codes, x, scales, pointers, M, N, stride_s, stride_z, stride_out, sizes, SPEC: gl.constexpr, OVERLAP: gl.constexpr
):  # fmt: skip
    """All rows of x times 64 columns: over one of `splits` shares of K, or several tiles over all.

    codes, x: descriptors, loaded by (64, block_k) and (block_m, block_k), eight codes of 4 bits a word. scales:
    (N, groups).
    """
    STAGES: gl.constexpr = SPEC.stages
    ROWS: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.block_k // SPEC.sub
    WIDTH: gl.constexpr = codes.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4, 1], [1, 16, 8])
    by_part: gl.constexpr = gl.SliceLayout(2, layout)
    tiles = gl.allocate_shared_memory(codes.dtype, [STAGES, _COLUMNS, WIDTH], codes.layout)
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
    for i in gl.static_range(STAGES):
        if begin + i < end:
            _fetch_codes(i, begin + i, codes, tiles, full, sizes, SPEC)
    scale = _per_part(scales, begin, N, stride_s, sizes, by_part, SPEC)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    for i in gl.static_range(STAGES):
        if begin + i < end:
            fetch_x(i, begin + i, x, values, full, sizes, SPEC)

    zeros = gl.zeros([PARTS, _COLUMNS, ROWS], gl.float32, layout)
    at = begin
    while at < end:
        tile = at // sizes.steps
        stop = gl.minimum(end, (tile + 1) * sizes.steps)
        acc = zeros
        for step in range(at, stop):
            place = step - begin
            stage = place % STAGES
            next_scale = _per_part(scales, gl.minimum(step + 1, end - 1), N, stride_s, sizes, by_part, SPEC)
            mbarrier.wait(full.index(stage), place // STAGES & 1)
            part = values_of(values.index(stage), layout, SPEC)
            numbers = numbers_of(tiles.index(stage), part, layout, SPEC)
            if SPEC.has_zero:
                operand: gl.constexpr = gl.DotOperandLayout(0, layout, 8)
                zero = _per_part(pointers.zeros, step, N, stride_z, sizes, gl.SliceLayout(2, operand), SPEC)
                numbers = numbers - gl.expand_dims(zero.to(x.dtype), 2)
            all_here()  # all warps must have read the stage before it is filled anew
            if step + STAGES < end:
                _fetch_codes(place + STAGES, step + STAGES, codes, tiles, full, sizes, SPEC)
                fetch_x(place + STAGES, step + STAGES, x, values, full, sizes, SPEC)
            acc += mma_v2(numbers, part, zeros) * gl.expand_dims(scale, 2)
            scale = next_scale
        total = gl.sum(acc, 0)
        is_first = True
        if SPEC.splits > 1:
            is_first = number % SPEC.splits == 0
            if is_first:
                total, _ = collect(total, total, number, pointers, SPEC)
            else:
                leave(total, total, number, pointers, SPEC)
        if is_first:
            _store(total, tile, M, N, stride_out, pointers, SPEC)
        at = stop
