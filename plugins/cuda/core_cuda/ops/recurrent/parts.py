"""Products of matrices with the digits of fp32 on matrix units, which multiply bf16 and sum in fp32.

What is not bf16 is split into parts of bf16, and each part of one matrix is multiplied by each of the other: one part
holds all digits of bf16, two those of fp16, three those of fp32.
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
def parts_of(x, PARTS: tl.constexpr):
    """Return three parts of bf16, the largest first; the sum of the first PARTS is x as near as so many can be."""
    if PARTS == 1:
        rounded = x.to(tl.bfloat16)
        return rounded, rounded, rounded
    else:
        wide = x.to(tl.float32)
        high = _high(wide)
        middle = _high(wide - high)
        return high.to(tl.bfloat16), middle.to(tl.bfloat16), (wide - high - middle).to(tl.bfloat16)


@triton.jit
def product_of_parts(lefts, rights, NUM_LEFTS: tl.constexpr, NUM_RIGHTS: tl.constexpr, PARTS: tl.constexpr):
    """Return the product of two matrices by so many of their parts, as `product` does."""
    result = tl.zeros((lefts[0].shape[0], rights[0].shape[1]), tl.float32)
    # The small products first: what they are rounded by is as small.
    for size in tl.static_range(PARTS):
        for part in tl.static_range(PARTS - size):
            if part < NUM_LEFTS and PARTS - 1 - size - part < NUM_RIGHTS:
                result = tl.dot(lefts[part], rights[PARTS - 1 - size - part], result)
    return result


@triton.jit
def product(left, right, PARTS: tl.constexpr, EXACT: tl.constexpr = False):
    """Return left (M, K) times right (K, N), each bf16, fp16 or fp32, as a sum of its own in fp32.

    PARTS: of what is fp32; 3 keep all of its digits, and 2 more than results have that are rounded to half precision.
    Products of parts that are smaller than the last digit of the result are left out. EXACT: fp32 by fp32 leaves out
    nothing, and is slow.
    """
    if left.dtype == right.dtype and (EXACT or left.dtype != tl.float32):
        return tl.dot(left, right, input_precision="ieee")
    else:
        num_lefts: tl.constexpr = 1 if left.dtype == tl.bfloat16 else 2 if left.dtype == tl.float16 else PARTS
        num_rights: tl.constexpr = 1 if right.dtype == tl.bfloat16 else 2 if right.dtype == tl.float16 else PARTS
        lefts, rights = parts_of(left, num_lefts), parts_of(right, num_rights)
        return product_of_parts(lefts, rights, num_lefts, num_rights, PARTS)
