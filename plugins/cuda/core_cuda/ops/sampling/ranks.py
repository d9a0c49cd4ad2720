"""Floating values as integers of the same order, alone or with an id, for atomics, reductions and bisection."""

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.jit
def packed(rank, ids):
    """Return rank and id as one int64, larger for a larger rank and among equal ones for a lower id."""
    return (rank.to(tl.int64) << 32) | (ids ^ _MOST).to(tl.int64)


@triton.jit
def id_in(pair):
    """Return the int32 id that is packed in an int64."""
    return (pair & _MOST).to(tl.int32) ^ _MOST
