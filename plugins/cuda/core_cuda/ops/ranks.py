"""Floating values as integers of the same order, which atomics, reductions and bisection take."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rank_of", "value_of"]

_MOST = tl.constexpr(2**31 - 1)


@triton.jit
def rank_of(values):
    """Return fp32 values as int32 of the same order: -0 equals 0, NaN is the largest."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return tl.where(values != values, _MOST, bits ^ ((bits >> 31) & _MOST))


@triton.jit
def value_of(rank):
    """Return the fp32 value of a rank."""
    return (rank ^ ((rank >> 31) & _MOST)).to(tl.float32, bitcast=True)
