"""`core::quantize_fp4`: quantisation to 4-bit floats in groups of 16, with fp8 scales of the groups and one fp32 scale.

The format is NVFP4 (Alvarez et al., "Introducing NVFP4", NVIDIA 2025): value = code * group scale * scale, with codes
in e2m1 (OCP Microscaling Formats 1.0, 5.3.3) and group scales in float8_e4m3fn. A byte holds two codes, the earlier
one in its lower half; `codes.view(torch.float4_e2m1fn_x2)` names them so.

Shapes: x (..., K), K a multiple of 16; codes (..., K / 2) uint8; group scales (..., K / 16); scale ().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare

GROUP = 16
"""Neighbours in a row that share a scale."""
LARGEST = 6.0
"""The largest e2m1 value; the others are 0, 0.5, 1, 1.5, 2, 3 and 4, and their negatives."""
_LARGEST_SCALE = 448.0


def quantize_fp4(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, the scales of their groups, and the scale they were made with, fp32 (fp64 for fp64 x).

    Without a scale it is the largest absolute value of x over 6 * 448, so that the largest group scale is 448, and at
    least the smallest normal fp32. A group scale is the largest of its group over 6 and over the scale, rounded to
    e4m3 and at most 448; codes are x / (group scale * scale), cut off at 6 and rounded to nearest even. A group whose
    scale rounds to 0 has codes of zero. NaN has no code.
    """
    compute = at_least_fp32(x.dtype)
    groups = x.to(compute).unflatten(-1, (-1, GROUP))
    # amax needs an element per group, and a tensor without tokens has none at all.
    largest = groups.abs().amax(-1)
    if scale is None:
        top = largest.amax() if largest.numel() else largest.new_zeros(())
        used = (top / (LARGEST * _LARGEST_SCALE)).clamp(min=torch.finfo(torch.float32).tiny)
    else:
        # The result must be a tensor of its own even where the cast changes nothing.
        used = scale.to(compute, copy=True)
    group_scales = (largest / LARGEST / used).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    steps = group_scales.to(compute)[..., None] * used
    codes = _e2m1(torch.where(steps > 0, groups / steps, torch.zeros_like(groups))).flatten(-2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous(), group_scales.contiguous(), used


def _e2m1(values: Tensor) -> Tensor:
    """Round to the nearest of the eight magnitudes, ties to the even code, and set bit 3 for negative ones."""
    size = values.abs()
    # A tie goes down where the code below is even.
    bounds = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    code = torch.zeros_like(values, dtype=torch.uint8)
    for bound, tie_goes_up in bounds:
        code = code + (size >= bound if tie_goes_up else size > bound).to(torch.uint8)
    return code | torch.signbit(values).to(torch.uint8) << 3


def _fake(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, wide = x.shape[:-1], x.shape[-1]
    return (
        x.new_empty((*rows, wide // 2), dtype=torch.uint8),
        x.new_empty((*rows, wide // GROUP), dtype=torch.float8_e4m3fn),
        x.new_empty((), dtype=at_least_fp32(x.dtype)),
    )


def _check(x: Tensor, scale: Tensor | None) -> None:
    op = "quantize_fp4"
    check_floating(op, x=x, scale=scale)
    fits = x.dim() >= 1 and x.shape[-1] % GROUP == 0
    check(fits, op, f"x must have rows of a multiple of {GROUP}, not shape {tuple(x.shape)}")
    check_shape(op, (), scale=scale)


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return rows with and without a scale, groups of zeros, values beyond the scale's range, no tokens, strides."""
    given = torch.tensor(0.004, dtype=draw.wide, device=draw.device)
    zeros = torch.zeros(3, 48, dtype=draw.dtype, device=draw.device)
    return {
        "rows": {"x": draw(7, 48, scale=3.0), "scale": None},
        "given scale": {"x": draw(7, 48, scale=3.0), "scale": given},
        "values beyond the scale": {"x": draw(5, 48, scale=3e3), "scale": given},
        "rows of zeros": {"x": torch.cat((draw(3, 48), zeros)), "scale": None},
        "no tokens": {"x": draw(0, 48), "scale": None},
        "transposed": {"x": draw(5, 3, 48).transpose(0, 1), "scale": None},
    }


QUANTIZE_FP4 = declare(
    CanonicalOp(
        schema="quantize_fp4(Tensor x, Tensor? scale) -> (Tensor codes, Tensor group_scales, Tensor scale)",
        reference=quantize_fp4,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=15,
    )
)
