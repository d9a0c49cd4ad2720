"""Products of matrices with the digits of fp32 on matrix units, which multiply bf16 and sum in fp32.

What is not bf16 is split into parts of bf16, and each part of one matrix is multiplied by each of the other: one part
holds all digits of bf16, two those of fp16, three those of fp32.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parts_of(x):
    """Return three parts of bf16 whose sum is x: the largest first."""
    high = x.to(tl.bfloat16)
    rest = x.to(tl.float32) - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


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
def product(left, right, PARTS: tl.constexpr):
    """Return left (M, K) times right (K, N), each bf16, fp16 or fp32, as a sum of its own in fp32.

    PARTS: of what is fp32; 3 keep all of its digits, and 2 more than results have that are rounded to half precision.
    Products of parts that are smaller than the last digit of the result are left out.
    """
    num_lefts: tl.constexpr = 1 if left.dtype == tl.bfloat16 else 2 if left.dtype == tl.float16 else PARTS
    num_rights: tl.constexpr = 1 if right.dtype == tl.bfloat16 else 2 if right.dtype == tl.float16 else PARTS
    return product_of_parts(parts_of(left), parts_of(right), num_lefts, num_rights, PARTS)
