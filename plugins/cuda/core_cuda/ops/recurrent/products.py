"""Products of matrices of which one side is known in fp32 and the other in half precision, on the matrix units.

Both are split into parts of bf16, one for bf16, two for fp16, up to three for fp32, and parts of one are multiplied by
parts of the other. Three hold all digits of fp32.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _high(x):
    """Return fp32 cut to the digits of bf16: what is left is exact, and no conversion, of which a multiprocessor does
    16 a cycle."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """Return parts of bf16, the largest first: of so many of the three the sum is x as near as can be."""
    if PARTS == 1:
        rounded = x.to(tl.bfloat16)
        return rounded, rounded, rounded
    else:
        wide = x.to(tl.float32)
        high = _high(wide)
        middle = _high(wide - high)
        return high.to(tl.bfloat16), middle.to(tl.bfloat16), (wide - high - middle).to(tl.bfloat16)


@triton.jit
def product(left, right, PARTS: tl.constexpr):
    """Return left (M, K) times right (K, N), a sum of its own in fp32, from so many parts of what is fp32."""
    if left.dtype == right.dtype:
        return tl.dot(left, right, input_precision="ieee")
    else:
        num_lefts: tl.constexpr = 1 if left.dtype == tl.bfloat16 else 2 if left.dtype == tl.float16 else PARTS
        num_rights: tl.constexpr = 1 if right.dtype == tl.bfloat16 else 2 if right.dtype == tl.float16 else PARTS
        lefts, rights = _parts(left, num_lefts), _parts(right, num_rights)
        result = tl.zeros((left.shape[0], right.shape[1]), tl.float32)
        # The small products first: what they are rounded by is as small.
        for size in tl.static_range(PARTS):
            for part in tl.static_range(PARTS - size):
                if part < num_lefts and PARTS - 1 - size - part < num_rights:
                    result = tl.dot(lefts[part], rights[PARTS - 1 - size - part], result)
        return result
