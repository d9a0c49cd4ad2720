"""What kernels for compute capability 9 share that stream a weight through shared memory: how its K is shared out.

A tile is 64 columns of the result. Programs take whole tiles one after the other, or each a share of the K of one. SPEC
is a named tuple with block_m, block_k, stages, splits and gated; sizes one with steps, the tiles along K.
"""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

COLUMNS = 64
"""Columns of the result in a tile: the height of the matrix units' left operand."""
_COLUMNS = gl.constexpr(COLUMNS)

# Triton 3.6 has it by the first name, 3.7 by the second.
all_here: Any = getattr(gl, "thread_barrier", None) or gl.barrier
"""Wait for all warps of a program."""


@gluon.jit
def begin_of(share, sizes, SPEC: gl.constexpr):
    """Return the step with which a share of a tile's K begins, counted over all tiles."""
    return share // SPEC.splits * sizes.steps + share % SPEC.splits * sizes.steps // SPEC.splits


@gluon.jit
def fetch_x(number, step, x, values, full, sizes, SPEC: gl.constexpr):
    """Begin to copy the columns of x for the number-th tile into its stage; zeros lie beyond its last row."""
    stage = number % SPEC.stages
    column = step % sizes.steps * SPEC.block_k
    tma.async_copy_global_to_shared(x, [0, column], full.index(stage), values.index(stage))


@gluon.jit
def _places(partial, number, acc, SPEC: gl.constexpr):
    """Return where a program leaves its partial sums like acc (64, block_m), of gate and, behind them, of up."""
    layout: gl.constexpr = acc.type.layout
    PARTS: gl.constexpr = 2 if SPEC.gated else 1
    rows = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(0, layout))
    partial += number.to(gl.int64) * (PARTS * _COLUMNS * SPEC.block_m)
    return partial + rows[:, None] * SPEC.block_m + columns[None, :]


@gluon.jit
def leave(acc, up, number, pointers, SPEC: gl.constexpr):
    """Leave partial sums for the program that has the tile's first share."""
    places = _places(pointers.partial, number, acc, SPEC)
    gl.store(places, acc)
    if SPEC.gated:
        gl.store(places + _COLUMNS * SPEC.block_m, up)
    all_here()  # all threads must have written before the arrival is told
    gl.atomic_add(pointers.arrived + number, 1, sem="release")


@gluon.jit
def collect(acc, up, number, pointers, SPEC: gl.constexpr):
    """Add the partial sums of a tile's other shares, in a fixed order, for the same bits each time.

    Programs with them are launched before this one, and wait for none, so that the wait ends.
    """
    SPLITS: gl.constexpr = SPEC.splits
    for share in gl.static_range(1, SPLITS):
        while gl.atomic_add(pointers.arrived + number + share, 0, sem="acquire") == 0:
            pass
    for share in gl.static_range(1, SPLITS):
        places = _places(pointers.partial, number + share, acc, SPEC)
        acc += gl.load(places, cache_modifier=".cg")
        if SPEC.gated:
            up += gl.load(places + _COLUMNS * SPEC.block_m, cache_modifier=".cg")
        gl.store(pointers.arrived + number + share, 0)  # reset for the next launch
    return acc, up
