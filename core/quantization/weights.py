"""Codes of a weight: quantising it, and packing 4-bit codes as compressed-tensors does.

Shapes: weight (N, K); scale and zero point (N, G), where G groups of K / G neighbours share one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.common.ops.linear.weight_only import WORD_BITS
from core.common.ops.quantize.symmetric import dequantize
from core.errors import UsageError
from core.quantization.parts import largest
from core.quantization.scheme import FP8, WeightScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A quantised weight."""

    #: (..., N, K), or packed int32 (..., N, ceil(K / 8)) for 4 bits.
    codes: Tensor
    #: (..., N, G) fp32.
    scale: Tensor
    #: (..., N, G) int8; None for symmetric codes.
    zero_point: Tensor | None = None


def check_weight(name: str, weight: Tensor, scheme: WeightScheme) -> None:
    """Raise `UsageError`, naming the layer, for a weight that is not finite or does not divide into groups."""
    asked = f"quantise layer {name!r}"
    if not weight.isfinite().all():
        count = int((~weight.isfinite()).sum())
        raise UsageError(
            asked,
            found=f"{count} of its {weight.numel()} weights are NaN or infinite",
            remedy="repair the checkpoint, or leave the layer out with ignore",
        )
    if scheme.granularity == "group" and weight.shape[-1] % scheme.group_size:
        raise UsageError(
            asked,
            found=f"its {weight.shape[-1]} input features do not divide into groups of {scheme.group_size}",
            remedy="choose a group size that divides them (for example 'w4a16-g32'), or leave the layer out",
        )


def quantize_weight(
    weight: Tensor, scheme: WeightScheme, group: str | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes of weight's shape (..., K), scale (..., G) fp32 and zero point (..., G) int8 or None.

    group: of processes, each of which has some columns; a row then has one scale over all of them. None: they are all.

    4-bit codes come as int8, from -8 to 7. Symmetric scales bring the largest magnitude of a group to the largest code;
    asymmetric ones spread smallest to largest value, zero included, over all codes.
    """
    low, high = scheme.code_range
    if scheme.granularity == "group":
        group = None  # no group of columns is cut
    groups = weight.to(torch.float32).unflatten(-1, (-1, scheme.group_size or weight.shape[-1]))
    if scheme.symmetric:
        scale = largest(groups.abs().amax(-1), group) / high
        zero = torch.zeros_like(scale)
    else:
        least = -largest(-groups.amin(-1).clamp(max=0.0), group)
        most = largest(groups.amax(-1).clamp(min=0.0), group)
        scale = (most - least) / (high - low)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    if not scheme.symmetric:
        zero = (low - least / scale).round().clamp(low, high)
    codes = (groups / scale[..., None] + zero[..., None]).clamp(low, high).view(weight.shape)
    codes = codes if scheme.dtype == FP8 else codes.round()
    return codes.to(scheme.dtype), scale, None if scheme.symmetric else zero.to(torch.int8)


def dequantize_weight(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Return the values (..., K) fp32 of codes (..., K) with scale and zero point (..., G)."""
    return dequantize(codes, scale, zero_point, torch.float32)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Return int8 codes (..., K) as int32 (..., ceil(K * num_bits / 32)), lowest bits first, each code plus 2^(bits-1).

    The layout of compressed-tensors' pack-quantized format; rows are filled up with zero bits.
    """
    per_word = WORD_BITS // num_bits
    unsigned = codes.to(torch.int32) + (1 << (num_bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(0, WORD_BITS, num_bits, dtype=torch.int32, device=codes.device)
    words = unsigned.unflatten(-1, (-1, per_word)) << shifts
    # The bits of different codes do not overlap, so the sum is their union; it wraps into the sign bit as it should.
    packed: Tensor = words.sum(-1, dtype=torch.int32)
    return packed
