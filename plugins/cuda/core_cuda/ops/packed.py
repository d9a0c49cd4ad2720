"""Codes of 4 bits, eight to an int32, unpacked in the registers of a kernel.

The format is that of core/common/ops/linear/weight_only.py: the first code of a word in its lowest bits, each stored as
code + 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(2.0**23)  # what these bits are as fp32: small integers lie in the low bits of the sum with them


@triton.jit
def _code(words, zero, AT: tl.constexpr):
    """Return code number AT of each word less zero. Setting bits of a float is faster than converting an integer."""
    bits = ((words >> (4 * AT)) & 15) | _MAGIC_BITS
    return bits.to(tl.float32, bitcast=True) - (zero + (_MAGIC + 8.0))


@triton.jit
def unpack(words, zero):
    """Return fp32 (..., 8 * W): the codes -8 to 7 of int32 words (..., W), in order, less zero; exact.

    zero: a number or a tensor that broadcasts to the words, fp32, of integers: the zero point, or 0.0. A thread unpacks
    the words that it has loaded, so that no data moves between threads.
    """
    even = tl.interleave(
        tl.interleave(_code(words, zero, 0), _code(words, zero, 4)),
        tl.interleave(_code(words, zero, 2), _code(words, zero, 6)),
    )
    odd = tl.interleave(
        tl.interleave(_code(words, zero, 1), _code(words, zero, 5)),
        tl.interleave(_code(words, zero, 3), _code(words, zero, 7)),
    )
    return tl.interleave(even, odd)
