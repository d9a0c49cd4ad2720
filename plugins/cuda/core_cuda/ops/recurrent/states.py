"""What the kernels of recurrent layers share: where a state lies, and which calls they take."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_cuda.ops import launching
from core_cuda.ops.conditions import dtypes


def why_not(call: OpCall) -> str | None:
    """Return why the kernels can't take a call, or None: a dtype, or states that are no run of memory each."""
    states, expected = call.args["states"], 1
    for size, stride in zip(reversed(states.shape[1:]), reversed(states.stride()[1:]), strict=True):
        if stride != expected and size != 1:
            return f"states have strides {tuple(states.stride())}, and the kernel takes each as one run of memory"
        expected *= size
    return dtypes(call)


def in_one_run(index: Tensor | None) -> Tensor | None:
    """Return a tensor that is one run of memory, a copy where it is not; None for None."""
    return None if index is None else index.contiguous()


def in_rows(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is one run of memory, a copy where it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def places(slots: Tensor | None, kept: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return where each row reads its state and where it writes it, as `slot_of` takes them."""
    read, written = in_one_run(slots), in_one_run(kept)
    return read, read if written is None else written


def block_of(num_states: int, size: int, *, most: int, least: int) -> int:
    """Return of how many columns or rows of a state a program takes care, a power of 2: fewer where programs are few.

    num_states: of all sequences and heads. size: columns or rows of each. most, least: the largest and the smallest
    block.
    """
    block: int = min(most, max(triton.next_power_of_2(size), 1))
    wanted = 2 * launching.num_multiprocessors()
    while block > least and num_states * triton.cdiv(size, block) < wanted:
        block //= 2
    return block


def results(like: Tensor, query_starts: Tensor | None) -> Tensor:
    """Return memory for results of the shape of a tensor: zeros where rows may be padding, which no program writes."""
    make = torch.empty if query_starts is None else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def num_sequences(num_rows: int, query_starts: Tensor | None) -> int:
    """Return how many sequences a call has: without query_starts, one for each row."""
    return num_rows if query_starts is None else query_starts.shape[0] - 1


def group_of(heads: int, groups: int) -> int:
    """Return how many heads share a group of inputs."""
    return max(heads // max(groups, 1), 1)


@triton.jit
def slot_of(slots, sequence):
    """Return the slot of a sequence, its number without slots, as int64."""
    if slots is None:
        return sequence.to(tl.int64)
    else:
        return tl.load(slots + sequence).to(tl.int64)


@triton.jit
def rows_of(query_starts, sequence):
    """Return the first row of a sequence and the first after it, as int64: without query_starts, it has one row."""
    if query_starts is None:
        return sequence.to(tl.int64), sequence.to(tl.int64) + 1
    else:
        return tl.load(query_starts + sequence).to(tl.int64), tl.load(query_starts + sequence + 1).to(tl.int64)


@triton.jit
def exponential(x):
    """Return exp(x) nearly rounded; 0 below -150.

    `tl.exp` multiplies by log2(e) and rounds before it takes the power, which a sum over thousands of steps shows. So
    whole powers of 2 are split off first, without rounding (Cody and Waite, 1980, by two parts of log(2)); what is left
    lies within 0.35, and its power series ends where the next term is lost.
    """
    x = tl.where(x < -150.0, -150.0, x)
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = tl.fma(whole, -1.42860677e-06, tl.fma(whole, -0.693145752, x))
    series = tl.fma(rest, 1.0 / 5040.0, 1.0 / 720.0)
    series = tl.fma(series, rest, 1.0 / 120.0)
    series = tl.fma(series, rest, 1.0 / 24.0)
    series = tl.fma(series, rest, 1.0 / 6.0)
    series = tl.fma(series, rest, 0.5)
    return (1.0 + tl.fma(rest * rest, series, rest)) * tl.exp2(whole)


@triton.jit
def within(step, bounded, rows, mask, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return steps of rows in their bounds, 0 for none: of all rows, or of those that `bounded` names."""
    found = step
    if LEAST > 0:
        found = tl.maximum(found, LEAST, propagate_nan=tl.PropagateNan.ALL)
    if MOST > 0:
        found = tl.minimum(found, MOST, propagate_nan=tl.PropagateNan.ALL)
    if bounded is not None and (LEAST > 0 or MOST > 0):
        found = tl.where(tl.load(bounded + rows, mask=mask, other=0) != 0, found, step)
    return found


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) nearly rounded."""
    # log(1 + u) of u up to 1 is 2 atanh(z). The logarithm of the hardware is exact to so many bits behind the point
    # alone, and would lose most of a small step.
    u = exponential(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    series = 1.0 / 15.0
    series = tl.fma(series, square, 1.0 / 13.0)
    series = tl.fma(series, square, 1.0 / 11.0)
    series = tl.fma(series, square, 1.0 / 9.0)
    series = tl.fma(series, square, 1.0 / 7.0)
    series = tl.fma(series, square, 1.0 / 5.0)
    series = tl.fma(series, square, 1.0 / 3.0)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.fma(2.0 * z * square, series, 2.0 * z)
