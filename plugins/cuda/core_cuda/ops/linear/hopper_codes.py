"""Codes of 4 and 8 bits made numbers in the registers in which the matrix units read them, for compute capability 9.

A thread holds eight codes that lie side by side in a row of the weight: a word of 4-bit codes, or two words of bytes.
As in packed.py, bits of floats are put together by integer operations, two numbers to a register; here as instructions,
so that the compiler takes none apart again. What a word of 4-bit codes gives without moving single codes is in the
order 0, 4, 1, 5, 2, 6, 3, 7: values of x are brought into the same order, and sums over K do not depend on it.
"""

# Gluon reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _powers(first, end):
    """Return first, 2 * first, 4 * first and so on, those below end."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _words_layout(block_k):
    """Lay out words (64, block_k / 8) of codes, and a dimension for the 8 codes of each, over four warps."""
    words = block_k // 8
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, n, 0] for n in _powers(4, words)] + [[8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, words, 8])


@gluon.constexpr_function
def _bytes_layout(block_k):
    """Lay out codes (64, block_k) of a byte in the same way."""
    registers = [[0, 1], [0, 2], [0, 4]] + [[0, n] for n in _powers(32, block_k)] + [[8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, block_k])


@gluon.constexpr_function
def _x_layout(block_k, block_m):
    """Lay out values (block_k, block_m) of x, all of them in each warp, as codes are laid out along K."""
    registers = (
        [[1, 0], [2, 0], [4, 0]] + [[n, 0] for n in _powers(32, block_k)] + [[0, n] for n in _powers(8, block_m)]
    )
    return gl.DistributedLinearLayout(
        registers, [[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]], [[0, 0], [0, 0]], [], [block_k, block_m]
    )


@gluon.constexpr_function
def _of_words(bf16):
    """Return instructions that make $0 to $3, two numbers each, of the word $4: code + 8 in a float's bits."""
    magic, offset, kind = ("0x43004300", "0x43084308", "bf16x2") if bf16 else ("0x64006400", "0x64086408", "f16x2")
    lines = ["{ .reg .b32 code, offset;", f"mov.b32 offset, {offset};"]
    for i in range(4):
        lines.append(f"shr.u32 code, $4, {4 * i};")
        lines.append(f"lop3.b32 code, code, 0x000f000f, {magic}, 0xea;")  # (code & mask) | magic
        lines.append(f"sub.{kind} ${i}, code, offset;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _of_int8(bf16):
    """Return instructions that make $0 to $3, two numbers each, of bytes $4 and $5: code + 128 in a float's bits."""
    lines = ["{ .reg .b32 code, pair, low, high, offset; .reg .f32 a, b, magic;"]
    lines += ["mov.b32 offset, 0x64806480;", "mov.f32 magic, 0f4B000080;"]
    for word in range(2):
        lines.append(f"xor.b32 code, ${4 + word}, 0x80808080;")
        for half in range(2):
            to, first, second = f"${2 * word + half}", 2 * half, 2 * half + 1
            if bf16:  # by way of fp32, whose upper half holds such an integer exactly
                for number, byte in (("a", first), ("b", second)):
                    lines.append(f"prmt.b32 pair, code, 0x4B000000, 0x765{byte};")
                    lines.append(f"mov.b32 {number}, pair; sub.f32 {number}, {number}, magic;")
                lines.append(f"mov.b32 low, a; mov.b32 high, b; prmt.b32 {to}, low, high, 0x7632;")
            else:
                lines.append(f"prmt.b32 pair, code, 0x64646464, 0x4{second}4{first};")
                lines.append(f"sub.f16x2 {to}, pair, offset;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _of_fp8(bf16):
    """Return instructions that make $0 to $3, two numbers each, of the bytes $4 and $5: hardware makes fp16 of them."""
    lines = ["{ .reg .b16 two, more, x, y; .reg .b32 pair, low, high; .reg .f32 a, b;"]
    for word in range(2):
        lines.append(f"mov.b32 {{two, more}}, ${4 + word};")
        for half in range(2):
            to, codes = f"${2 * word + half}", ("two", "more")[half]
            if bf16:  # by way of fp32, whose upper half holds such a number exactly
                lines.append(f"cvt.rn.f16x2.e4m3x2 pair, {codes}; mov.b32 {{x, y}}, pair;")
                lines.append("cvt.f32.f16 a, x; cvt.f32.f16 b, y; mov.b32 low, a; mov.b32 high, b;")
                lines.append(f"prmt.b32 {to}, low, high, 0x7632;")
            else:
                lines.append(f"cvt.rn.f16x2.e4m3x2 {to}, {codes};")
    return "\n".join([*lines, "}"])


_REORDER: Any = gl.constexpr(
    "prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;"
)
"""Makes values 0, 4, 1, 5, 2, 6, 3 and 7, two to a register, of values 0 to 7."""


@gluon.jit
def numbers_of(tile, values, layout: gl.constexpr, SPEC: gl.constexpr):
    """Return the codes of a tile as numbers (parts, 64, sub) of the dtype of values, operands of the matrix units."""
    K: gl.constexpr = SPEC.block_k
    SUB: gl.constexpr = SPEC.sub
    PARTS: gl.constexpr = K // SUB
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 8)
    BF16: gl.constexpr = values.dtype == gl.bfloat16
    if SPEC.bits == 4:
        WORDS: gl.constexpr = K // 8
        in_words: gl.constexpr = _words_layout(K)
        words = gl.expand_dims(tile.load(gl.SliceLayout(2, in_words)), 2)
        words = words + gl.zeros([64, WORDS, 8], gl.int32, in_words)  # each word eight times, in one register
        CODE: gl.constexpr = _of_words(BF16)
        numbers = gl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words], dtype=values.dtype, is_pure=True, pack=8
        )
    else:
        in_bytes: gl.constexpr = _bytes_layout(K)
        CODES: gl.constexpr = _of_fp8(BF16) if SPEC.fp8 else _of_int8(BF16)
        numbers = gl.inline_asm_elementwise(
            CODES, "=r,=r,=r,=r,r,r", [tile.load(in_bytes)], dtype=values.dtype, is_pure=True, pack=8
        )
    return gl.convert_layout(numbers.reshape([64, PARTS, SUB]).permute((1, 0, 2)), operand, assert_trivial=True)


@gluon.jit
def values_of(tile, layout: gl.constexpr, SPEC: gl.constexpr):
    """Return a tile of x as (parts, sub, block_m), operands of the matrix units, in the order of the codes."""
    K: gl.constexpr = SPEC.block_k
    SUB: gl.constexpr = SPEC.sub
    ROWS: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = K // SUB
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 8)
    as_codes: gl.constexpr = _x_layout(K, ROWS)
    values = tile.permute((1, 0)).load(as_codes)
    if SPEC.bits == 4:
        values = gl.inline_asm_elementwise(
            _REORDER, "=r,=r,=r,=r,r,r,r,r", [values], dtype=values.dtype, is_pure=True, pack=8
        )
    return gl.convert_layout(values.reshape([PARTS, SUB, ROWS]), operand, assert_trivial=True)
