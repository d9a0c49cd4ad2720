"""`core::quantize_asymmetric`: quantisation to int8 with a zero point, so that one-sided values use all codes.

value = (code - zero point) * scale, where the zero point is int8 and of the scale's shape. Shapes: x (..., K); scale
and zero point () for granularity "tensor", (..., 1) for "token". Source: Jacob et al., arXiv 1712.05877, section 2.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_choice, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare

GRANULARITIES = ("token", "tensor")
LOW, HIGH = -128.0, 127.0


def quantize_asymmetric(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, *, dtype: torch.dtype, granularity: str = "token"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of x's shape with scale, fp32 (fp64 for fp64 x), and zero point, int8; all contiguous.

    codes = x / scale + zero_point in that dtype, rounded to nearest even and cut off at -128 and 127. scale and
    zero_point are given both or neither; without them a region's smallest and largest value, zero included, become -128
    and 127, and the zero point is rounded, so that zero has a code of its own. dtype: int8. NaN has no code: where
    the scale is given it is lost, as in `core::quantize`, and code 0, which processors give it, does not stand for 0.
    """
    compute = at_least_fp32(x.dtype)
    values = x.to(compute)
    if scale is None or zero_point is None:
        least, most = _bounds(values, granularity)
        used = ((most - least) / (HIGH - LOW)).clamp(min=torch.finfo(torch.float32).tiny)
        zero = (-least / used + LOW).round().clamp(LOW, HIGH)
    else:
        # The results must be tensors of their own even where the casts change nothing.
        used = scale.to(compute, copy=True, memory_format=torch.contiguous_format)
        zero = zero_point.to(compute)
    codes = (values / used + zero).clamp(LOW, HIGH).round()
    return codes.to(dtype).contiguous(), used, zero.to(torch.int8, memory_format=torch.contiguous_format)


def _bounds(values: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each region, zero included."""
    if granularity == "token":
        return values.amin(-1, keepdim=True).clamp(max=0.0), values.amax(-1, keepdim=True).clamp(min=0.0)
    if values.numel() == 0:
        return values.new_zeros(()), values.new_zeros(())
    return values.amin().clamp(max=0.0), values.amax().clamp(min=0.0)


def _scale_shape(x: Tensor, granularity: str) -> tuple[int, ...]:
    return () if granularity == "tensor" else (*x.shape[:-1], 1)


def _fake(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, *, dtype: torch.dtype, granularity: str = "token"
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _scale_shape(x, granularity)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(shape, dtype=at_least_fp32(x.dtype)),
        x.new_empty(shape, dtype=torch.int8),
    )


def _check(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, *, dtype: torch.dtype, granularity: str = "token"
) -> None:
    op = "quantize_asymmetric"
    check_floating(op, x=x, scale=scale)
    check(x.dim() >= 1, op, "x must have rank 1 or more")
    check(dtype == torch.int8, op, f"dtype must be torch.int8, not {dtype}")
    check_choice(op, "granularity", granularity, GRANULARITIES)
    check((scale is None) == (zero_point is None), op, "scale and zero_point must be given both, or neither")
    check_shape(op, _scale_shape(x, granularity), scale=scale, zero_point=zero_point)
    if zero_point is not None:
        check(zero_point.dtype == torch.int8, op, f"zero_point must be torch.int8, not {zero_point.dtype}")


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return both granularities, with and without a scale, one-sided rows, rows of zeros, values beyond the range."""
    calls: dict[str, dict[str, Any]] = {}
    for granularity in GRANULARITIES:
        x = draw(7, 48, scale=3.0, shift=1.0)
        calls[granularity] = {"x": x, "scale": None, "zero_point": None, "granularity": granularity}
        shape = _scale_shape(x, granularity)
        given = {
            "scale": draw(*shape, scale=0.002, shift=0.02, dtype=draw.wide),
            "zero_point": draw(*shape, scale=30.0, dtype=torch.float32).to(torch.int8),
        }
        calls[f"{granularity}, given scale"] = calls[granularity] | given
    rows: dict[str, Tensor] = {
        "all positive": draw.magnitudes(5, 48) + 1.0,
        "all negative": -draw.magnitudes(5, 48) - 1.0,
        "rows of zeros": torch.cat((draw(3, 48), torch.zeros(3, 48, dtype=draw.dtype, device=draw.device))),
        "no tokens": draw(0, 48),
        "nothing at all": draw(0, 48),
        "transposed": draw(5, 3, 48).transpose(0, 1),
        "slice of wider rows": draw(5, 144)[:, 48:96],
    }
    calls |= {name: {"x": x, "scale": None, "zero_point": None} for name, x in rows.items()}
    calls["nothing at all"]["granularity"] = "tensor"
    return {name: {"dtype": torch.int8, **call} for name, call in calls.items()}


QUANTIZE_ASYMMETRIC = declare(
    CanonicalOp(
        schema="quantize_asymmetric(Tensor x, Tensor? scale, Tensor? zero_point, *, ScalarType dtype, "
        'str granularity="token") -> (Tensor codes, Tensor scale, Tensor zero_point)',
        reference=quantize_asymmetric,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=12,
    )
)
