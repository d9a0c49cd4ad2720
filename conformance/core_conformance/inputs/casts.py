"""Casts between floating dtypes: what to cast, and the one right answer to each."""

from __future__ import annotations

import math

import torch


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round a number to the nearest one of a floating dtype, halves to the even one, overflow to infinity."""
    if value == 0 or not math.isfinite(value):
        return value
    info = torch.finfo(dtype)
    digits = -round(math.log2(info.eps))
    quantum = 2.0 ** (max(math.frexp(value)[1] - 1, round(math.log2(info.tiny))) - digits)
    result = round(value / quantum) * quantum  # both steps are exact in fp64, and `round` takes halves to even
    return math.copysign(math.inf, value) if abs(result) > info.max else result


def cast_values() -> list[float]:
    """Return fp32 numbers on which rounding modes differ: halves between neighbours, of both signs, and limits."""
    edges = [1 + n / 2**digits for digits in (8, 9, 11, 12) for n in (1, 2, 3, 5)]
    near = [edge + sign * 2.0**-20 for edge in edges for sign in (-1, 1)]
    large = [65504.0, 65519.0, 65520.0, 3.0e38, 3.3961e38, math.inf, 0.0]
    values = [*edges, *near, *large, 0.1, 1e-3, 2049.0, 2051.0, 257.0, 259.0]
    return [*values, *(-value for value in values), math.nan]


CASTS: tuple[tuple[torch.dtype, torch.dtype], ...] = tuple(
    (given, wanted)
    for given in (torch.float32, torch.bfloat16, torch.float16)
    for wanted in (torch.float32, torch.bfloat16, torch.float16)
    if given != wanted
)
"""Source dtype, target dtype."""
