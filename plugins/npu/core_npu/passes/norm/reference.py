"""References of torch_npu's norms, gates and quantisations, from CANN's formulas for aclnnRmsNorm and its kin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core_npu.passes.reference import formula, normed, require, wide

__all__ = ["dynamic", "scaled"]


def to_codes(y: Tensor) -> Tensor:
    """Return int8 codes of values in units of their scale."""
    return y.round().clamp(-128, 127).to(torch.int8)


def scaled(y: Tensor, scales: Tensor, zero_points: Tensor | None, *, div_mode: bool) -> Tensor:
    """Return int8 codes by given scales."""
    y = y / wide(scales) if div_mode else y * wide(scales)
    return to_codes(y if zero_points is None else y + zero_points.to(y.dtype))


def dynamic(y: Tensor, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the scale of each row."""
    y = y if smooth is None else y * wide(smooth)
    scale = y.abs().amax(-1) / 127
    return to_codes(y / torch.where(scale == 0, 1, scale)[..., None]), scale


@formula
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the norm of each row and its factor 1 / rms."""
    y, rstd = normed(input, gamma, epsilon)
    return y.to(input.dtype), rstd


@formula
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    """Return the norm of x1 + x2, its factor, and the sum."""
    total = x1 + x2
    y, rstd = normed(total, gamma, epsilon)
    return y.to(x1.dtype), rstd, total


@formula
def npu_add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    """Return the norm of x1 + x2 in fp32 and as it is written, its factor, and the sum."""
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return wide(y), y, rstd, total


@formula
def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[Tensor, ...]:
    """Return codes of the norm of x1 + x2 by one or two given scales, and the sum."""
    require(axis == -1 and dst_type in (None, 1) and scales1.shape == gamma.shape)
    total = x1 + x2
    y = normed(total, gamma, epsilon, beta)[0]
    first = scaled(y, scales1, zero_points1, div_mode=div_mode)
    second = torch.zeros_like(first) if scales2 is None else scaled(y, scales2, zero_points2, div_mode=div_mode)
    return first, second, total


@formula
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, ...]:
    """Return codes of the norm of x1 + x2 by token, once or twice, the sum, and the scales."""
    require(y_dtype in (None, 1))
    mask = output_mask or [True, smooth_scale1 is not None and smooth_scale2 is not None]
    total = x1 + x2
    y = normed(total, gamma, epsilon, beta)[0]
    # What is masked holds nothing: the meta kernel gives no elements, the real one a single element of garbage.
    nothing = x1.new_full((), 77, dtype=torch.int8), wide(x1).new_full((), float("nan"))
    first, second = (
        dynamic(y, smooth) if asked else nothing
        for smooth, asked in zip((smooth_scale1, smooth_scale2), mask, strict=True)
    )
    return first[0], second[0], total, first[1], second[1]


@formula
def npu_rms_norm_quant(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor,
    offset: Tensor,
    epsilon: float = 1e-6,
    *,
    dst_dtype: int | None = None,
) -> Tensor:
    """Return codes of the norm, multiplied by one scale."""
    require(dst_dtype in (None, 1) and scale.shape == offset.shape == (1,) and beta.shape == gamma.shape)
    return scaled(normed(x, gamma, epsilon, beta)[0], scale, offset, div_mode=False)


@formula
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Return codes by scales of one axis, divided or multiplied by."""
    require(dtype in (1, 12))
    if scales.ndim == 1 and div_mode and axis % input.ndim != input.ndim - 1:
        shape = [-1 if dim == axis % input.ndim else 1 for dim in range(input.ndim)]
        scales, zero_points = scales.view(shape), None if zero_points is None else zero_points.view(shape)
    return scaled(wide(input), scales, zero_points, div_mode=div_mode)


@formula
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return codes and the scale of each row."""
    require(group_index is None and dst_type in (None, 1, 12) and quant_mode == "pertoken")
    return dynamic(wide(input), smooth_scales)


@formula
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return silu(first half) * second half."""
    gate, up = wide(input).chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


@formula
def npu_dequant_swiglu_quant(
    x: Tensor, *, quant_scale: Tensor | None = None, activate_left: bool = False, quant_mode: int = 0, **others: Any
) -> tuple[Tensor, Tensor]:
    """Return codes by token of a gate of rows, without the dequantisation before it."""
    require(
        quant_mode == 1 and not any(others.get(name) is not None for name in ("weight_scale", "bias", "group_index"))
    )
    gate, up = wide(x).chunk(2, -1) if activate_left else reversed(wide(x).chunk(2, -1))
    return dynamic(torch.nn.functional.silu(gate) * up, quant_scale if quant_scale is None else quant_scale.flatten())
