"""`core::weight_only_linear`: a linear layer whose weight alone is quantised, to int8, fp8 or packed 4-bit codes.

Shapes: x (..., K) floating; w_codes (N, K) int8 or fp8, or int32 (N, ceil(K / 8)) for 4 bits; w_scale (N, G) and
w_zero_point (N, G) int8 or None: one for each of G groups of K / G neighbours in a row; bias (N,).

Packed codes are those of compressed-tensors' pack-quantized format: eight to an int32, the first in the lowest bits,
each stored as code + 8, so that codes run from -8 to 7. Groups of one scale: Frantar et al., arXiv 2210.17323.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.quantize.symmetric import RANGES, check_zero_point, dequantize

PACKED_BITS = 4
WORD_BITS = 32
CODES_PER_WORD = WORD_BITS // PACKED_BITS


def weight_only_linear(
    x: Tensor, w_codes: Tensor, w_scale: Tensor, w_zero_point: Tensor | None, bias: Tensor | None, *, num_bits: int = 8
) -> Tensor:
    """Return `x @ w.T + bias` (..., N) of the dequantised w, rounded once, to x's dtype.

    num_bits: 8, or 4 for packed codes. bias is added before rounding. Computed in fp32, fp64 for fp64 x.
    """
    compute = at_least_fp32(x.dtype)
    w = dequantize(unpacked(w_codes, num_bits, x.shape[-1]), w_scale, w_zero_point, compute)
    return functional.linear(x.to(compute), w, None if bias is None else bias.to(compute)).to(x.dtype)


def unpacked(codes: Tensor, num_bits: int, num_codes: int) -> Tensor:
    """Return codes (..., num_codes) as int8 or fp8: as they are for 8 bits, unpacked from int32 for 4."""
    return unpack(codes, num_bits, num_codes) if num_bits == PACKED_BITS else codes


def unpack(words: Tensor, num_bits: int, num_codes: int) -> Tensor:
    """Return the first num_codes int8 codes of each row of int32 words, lowest bits first, each stored off zero."""
    shifts = torch.arange(0, WORD_BITS, num_bits, dtype=torch.int32, device=words.device)
    # Expanded by hand: some devices give a shift the size of its left side alone.
    spread = words[..., None].expand(*words.shape, shifts.numel())
    codes = ((spread >> shifts) & ((1 << num_bits) - 1)).flatten(-2)
    return (codes[..., :num_codes] - (1 << (num_bits - 1))).to(torch.int8)


def _fake(x: Tensor, w_codes: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], w_codes.shape[0]))


def _check(
    x: Tensor, w_codes: Tensor, w_scale: Tensor, w_zero_point: Tensor | None, bias: Tensor | None, *, num_bits: int = 8
) -> None:
    op = "weight_only_linear"
    check_floating(op, x=x, w_scale=w_scale, bias=bias)
    check(x.dim() >= 1 and w_codes.dim() == 2, op, "x must have rank 1 or more and w_codes rank 2")
    check_weight_codes(op, w_codes, w_scale, w_zero_point, num_bits, x.shape[-1])
    check_shape(op, (w_codes.shape[0],), bias=bias)


def check_weight_codes(
    op: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, num_inputs: int
) -> None:
    """Raise `RuntimeError` unless codes (..., N, K), packed or not, scale and zero point (..., N, G) go together."""
    check(num_bits in (8, PACKED_BITS), op, f"num_bits must be 8 or {PACKED_BITS}, not {num_bits}")
    packed = num_bits == PACKED_BITS
    known = (torch.int32,) if packed else tuple(RANGES)
    message = f"w_codes of {num_bits} bits must be {' or '.join(map(str, known))}, not {codes.dtype}"
    check(codes.dtype in known, op, message)
    width = -(-num_inputs // CODES_PER_WORD) if packed else num_inputs
    message = f"x has rows of {num_inputs}, w_codes {tuple(codes.shape)} must have {width} columns"
    check(codes.shape[-1] == width, op, message)
    fits = scale.shape[:-1] == codes.shape[:-1] and scale.shape[-1] > 0 and num_inputs % scale.shape[-1] == 0
    message = f"w_scale {tuple(scale.shape)} does not divide w_codes of shape {(*codes.shape[:-1], num_inputs)}"
    check(fits, op, message)
    check_zero_point(op, "w", codes, scale, zero_point)


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return each format, one scale per row and per group, with and without zero points and bias."""
    bias = draw(24)

    def weight(num_bits: int, groups: int, code: torch.dtype = torch.int8, zero: bool = False) -> dict[str, Any]:
        codes = draw(24, 48, scale=40.0, dtype=torch.float32).to(code)
        if num_bits == PACKED_BITS:
            codes = (draw(24, 6, dtype=torch.float64) * 2**29).to(torch.int32)
        zeros = draw(24, groups, scale=3.0, dtype=torch.float32).to(torch.int8) if zero else None
        scale = draw(24, groups, scale=0.002, shift=0.01, dtype=draw.wide)
        return {"w_codes": codes, "w_scale": scale, "w_zero_point": zeros, "num_bits": num_bits}

    formats = {
        "int8 by row": weight(8, 1),
        "int8 by group, zero points": weight(8, 3, zero=True),
        "fp8 by row": weight(8, 1, torch.float8_e4m3fn),
        "int4 by row": weight(4, 1),
        "int4 by group": weight(4, 3),
        "int4 by group, zero points": weight(4, 3, zero=True),
    }
    return {name: {"x": draw(7, 48), **given, "bias": bias} for name, given in formats.items()} | {
        "no bias": {"x": draw(2, 3, 48), **weight(4, 6), "bias": None},
        "no tokens": {"x": draw(0, 48), **weight(4, 6), "bias": bias},
        "one row": {"x": draw(1, 48), **weight(4, 6), "bias": bias},
        "slice of wider rows": {"x": draw(5, 144)[:, 48:96], **weight(8, 1), "bias": bias},
        # The last int32 of a row is not full.
        "int4, odd rows": {**weight(4, 1), "x": draw(3, 45), "bias": None},
    }


WEIGHT_ONLY_LINEAR = declare(
    CanonicalOp(
        schema="weight_only_linear(Tensor x, Tensor w_codes, Tensor w_scale, Tensor? w_zero_point, Tensor? bias, *, "
        "int num_bits=8) -> Tensor",
        reference=weight_only_linear,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=13,
    )
)
