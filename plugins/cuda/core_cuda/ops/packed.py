"""Integer codes of 8 bits, and of 4 bits packed eight to an int32, made numbers in the registers of a kernel.

Packed as in core/common/ops/linear/weight_only.py: the first code of a word in its lowest bits, each stored as
code + 8. The numbers, less a zero point of int8, are exact in bf16 and fp16 too. Bits of floats are put together
by integer arithmetic, since instructions that convert integers take several times as long.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MAGIC_BITS = tl.constexpr(0x4B400000)
_MAGIC = tl.constexpr(1.5 * 2.0**23)
"""These bits as fp32: adding a small integer to the bits adds it to the number."""


@triton.jit
def widen(codes, zero):
    """Return fp32 numbers: int8 codes less zero, which broadcasts to them: fp32, of integers; 0.0 for none."""
    return (codes.to(tl.int32) + _MAGIC_BITS).to(tl.float32, bitcast=True) - (zero + _MAGIC)


@triton.jit
def _code(words, zero, AT: tl.constexpr):
    """Return code number AT of each word less zero."""
    return (((words >> (4 * AT)) & 15) | _MAGIC_BITS).to(tl.float32, bitcast=True) - (zero + (_MAGIC + 8.0))


@triton.jit
def unpack(words, zero):
    """Return fp32 (..., 8 * W): the codes -8 to 7 of int32 words (..., W), in order, less zero, as for `widen`.

    A thread unpacks the words that it has loaded, so that no data moves between threads.
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


@triton.jit
def unpack_bytes(codes, dtype: tl.constexpr):
    """Return (R, 2 * B) of dtype, bfloat16 or float16: the codes -8 to 7 of words seen as bytes (R, B) uint8, in order.

    For operands of `tl.dot`: unlike `unpack`, what a thread loads for the matrix units is unpacked where it is, two
    codes at a time, without a way through shared memory.
    """
    # Bits of floats again: 128 and 1024 are the powers of two whose last bits count ones.
    MAGIC_BITS: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    OFFSET: tl.constexpr = 136.0 if dtype == tl.bfloat16 else 1032.0
    both = ((codes.to(tl.uint32) * 0x1001) & 0x000F000F) | MAGIC_BITS
    pairs = tl.join((both & 0xFFFF).to(tl.uint16), (both >> 16).to(tl.uint16))
    numbers = tl.reshape(pairs, (codes.shape[0], 2 * codes.shape[1])).to(dtype, bitcast=True)
    return numbers - tl.full((1, 1), OFFSET, tl.float32).to(dtype)
