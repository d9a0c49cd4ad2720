"""`core::quantize`, `core::quantized_linear`: symmetric quantisation to fp8 or int8, and a linear layer on its codes.

Shapes: x (..., K); weight codes (N, K). A scale is one number per region of codes, value = code * scale:

    tensor   ()            one for all                           weights: () or (1, 1)
    token    (..., 1)      one per row                           weights, per output channel: (N, 1)
    group    (..., K / g)  one per g neighbours in a row         weights: (N, K / g), in blocks (N / b, K / g)

A zero point is int8 and of its scale's shape: value = (code - zero point) * scale. Codes with zero points come from
`core::quantize_asymmetric` (core/common/ops/quantize/asymmetric.py).

Formats: float8_e4m3fn, largest 448 (Micikevicius et al., arXiv 2209.05433); int8, symmetric, scaled to 127. Groups and
blocks are DeepSeek-V3's (arXiv 2412.19437, 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_choice, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare

GRANULARITIES = ("token", "tensor", "group")

RANGES: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {torch.float8_e4m3fn: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
)
"""Code dtype -> smallest and largest code."""


def quantize(
    x: Tensor, scale: Tensor | None, *, dtype: torch.dtype, granularity: str = "token", group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """Return codes of x's shape and the scale they were made with, fp32 (fp64 for fp64 x), contiguous.

    codes = x / scale in that dtype, cut off at the range of `dtype` and rounded to nearest even. scale: of the shape
    that granularity says; without one, the largest absolute value of each region over the largest code, at least the
    smallest normal fp32, so that a region of zeros gives codes of zero. group_size: g, for granularity group only.

    What is not finite: without a scale, NaN or infinity in a region makes its scale so, and with it all values of the
    region. With one, infinity is cut off like any large number, and NaN stays NaN in fp8. int8 has no code for NaN: it
    gets that of the device's cast, which torch leaves open. Processors and PTX (cvt.rni.sat.s8.f32, as in vLLM's
    kernels) give 0, so that a NaN is lost there.
    """
    compute = at_least_fp32(x.dtype)
    low, high = RANGES[dtype]
    regions = x.to(compute).unflatten(-1, (-1, group_size)) if granularity == "group" else x.to(compute)
    if scale is None:
        scale = _largest(regions, granularity) / high
        used = scale.clamp(min=torch.finfo(torch.float32).tiny)
    else:
        # The result must be a tensor of its own even where the cast changes nothing.
        used = scale.to(compute, copy=True, memory_format=torch.contiguous_format)
    codes = (regions / (used[..., None] if granularity == "group" else used)).clamp(low, high).view(x.shape)
    codes = codes.round() if dtype == torch.int8 else codes
    return codes.to(dtype).contiguous(), used


def _largest(regions: Tensor, granularity: str) -> Tensor:
    magnitude = regions.abs()
    if granularity == "tensor":
        # A tensor without elements has no largest one.
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    return magnitude.amax(-1, keepdim=granularity == "token")


def _scale_shape(x: Tensor, granularity: str, group_size: int) -> tuple[int, ...]:
    if granularity == "tensor":
        return ()
    return (*x.shape[:-1], x.shape[-1] // group_size if granularity == "group" else 1)


def _quantize_fake(
    x: Tensor, scale: Tensor | None, *, dtype: torch.dtype, granularity: str = "token", group_size: int = 0
) -> tuple[Tensor, Tensor]:
    shape = _scale_shape(x, granularity, group_size)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=at_least_fp32(x.dtype))


def _check_quantize(
    x: Tensor, scale: Tensor | None, *, dtype: torch.dtype, granularity: str = "token", group_size: int = 0
) -> None:
    op = "quantize"
    check_floating(op, x=x, scale=scale)
    check(x.dim() >= 1, op, "x must have rank 1 or more")
    check(dtype in RANGES, op, f"dtype {dtype} is none of {', '.join(map(str, RANGES))}")
    check_choice(op, "granularity", granularity, GRANULARITIES)
    if granularity == "group":
        fits = group_size > 0 and x.shape[-1] % group_size == 0
        check(
            fits, op, f"group_size must be a positive divisor of {x.shape[-1]}, the size of x's rows, not {group_size}"
        )
    else:
        check(group_size == 0, op, f"group_size={group_size} has no meaning for granularity {granularity!r}")
    check_shape(op, _scale_shape(x, granularity, group_size), scale=scale)


def quantized_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
) -> Tensor:
    """Return `x @ w.T + bias` (..., N) of the dequantised x (..., K) and w (N, K), rounded once, to out_dtype.

    Scales are as in the legend above; any scale whose dimensions divide those of its codes is taken as one per region.
    bias (N,), added before rounding. Zero points go with int8 codes only; None means zero. Computed in fp32, fp64 if a
    scale is fp64.
    """
    compute = at_least_fp32(torch.promote_types(x_scale.dtype, w_scale.dtype))
    x, w = (
        dequantize(codes, scale, zero_point, compute)
        for codes, scale, zero_point in ((x_codes, x_scale, x_zero_point), (w_codes, w_scale, w_zero_point))
    )
    return functional.linear(x, w, None if bias is None else bias.to(compute)).to(out_dtype)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, compute: torch.dtype) -> Tensor:
    """Return the values of codes in compute: `(codes - zero_point) * scale`, each scale for its region."""
    values = codes.to(compute)
    if zero_point is not None:
        values = values - _spread(zero_point.to(compute), codes)
    return values * _spread(scale.to(compute), codes)


def _spread(regions: Tensor, codes: Tensor) -> Tensor:
    """Repeat one number per region until it broadcasts to the codes."""
    for dim in range(regions.dim()):
        if regions.shape[dim] not in (1, codes.shape[dim]):
            regions = regions.repeat_interleave(codes.shape[dim] // regions.shape[dim], dim)
    return regions


def _linear_fake(x_codes: Tensor, _: Tensor, w_codes: Tensor, *__: Any, out_dtype: torch.dtype, **___: Any) -> Tensor:
    return x_codes.new_empty((*x_codes.shape[:-1], w_codes.shape[0]), dtype=out_dtype)


def _check_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
) -> None:
    op = "quantized_linear"
    check_floating(op, x_scale=x_scale, w_scale=w_scale, bias=bias)
    check(x_codes.dim() >= 1 and w_codes.dim() == 2, op, "x_codes must have rank 1 or more and w_codes rank 2")
    fits = x_codes.shape[-1] == w_codes.shape[1]
    check(fits, op, f"x_codes {tuple(x_codes.shape)} and w_codes {tuple(w_codes.shape)} differ in their last dimension")
    for name, codes, scale in (("x", x_codes, x_scale), ("w", w_codes, w_scale)):
        check(codes.dtype in RANGES, op, f"{name}_codes must be {' or '.join(map(str, RANGES))}, not {codes.dtype}")
        fits = scale.dim() in (0, codes.dim()) and all(
            s == c or s == 1 or (s > 0 and c % s == 0) for s, c in zip(scale.shape, codes.shape, strict=False)
        )
        shapes = f"{name}_scale {tuple(scale.shape)} does not divide {name}_codes {tuple(codes.shape)}"
        check(fits, op, shapes)
    check_zero_point(op, "x", x_codes, x_scale, x_zero_point)
    check_zero_point(op, "w", w_codes, w_scale, w_zero_point)
    check_shape(op, (w_codes.shape[0],), bias=bias)


def check_zero_point(op: str, name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise `RuntimeError` unless a zero point is None, or int8, of its scale's shape and for codes of integers."""
    if zero_point is None:
        return
    known = (torch.int8, torch.int32)  # int32: packed codes
    message = f"{name}_zero_point is for int8 codes, not {codes.dtype}"
    check(codes.dtype in known, op, message)
    check(zero_point.dtype == torch.int8, op, f"{name}_zero_point must be torch.int8, not {zero_point.dtype}")
    fits = zero_point.shape == scale.shape
    check(fits, op, f"{name}_zero_point {tuple(zero_point.shape)} and {name}_scale {tuple(scale.shape)} must agree")


def _quantize_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return each granularity and format, with and without a scale, rows of zeros, values beyond the scale's range."""
    calls: dict[str, dict[str, Any]] = {}
    for code in RANGES:
        short = str(code).removeprefix("torch.")
        for granularity in GRANULARITIES:
            options = {"dtype": code, "granularity": granularity}
            options |= {"group_size": 16} if granularity == "group" else {}
            x = draw(7, 48, scale=3.0)
            scale = draw(*_scale_shape(x, granularity, 16), scale=0.002, shift=0.01, dtype=draw.wide)
            calls[f"{short}, {granularity}"] = {"x": x, "scale": None, **options}
            calls[f"{short}, {granularity}, given scale"] = {"x": x, "scale": scale, **options}
        rows = draw(3, 48)
        zeros = torch.cat((rows, torch.zeros_like(rows)))
        calls[f"{short}, rows of zeros"] = {"x": zeros, "scale": None, "dtype": code}
        calls[f"{short}, no tokens"] = {"x": draw(0, 48), "scale": None, "dtype": code}
    whole = {"scale": None, "dtype": torch.int8, "granularity": "tensor"}
    return calls | {
        "nothing at all": {"x": draw(0, 48), **whole},
        "transposed": {"x": draw(5, 3, 48).transpose(0, 1), **whole},
    }


def _linear_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return each pair of scale shapes in use, both formats, with and without bias."""
    bias = draw(24)
    scales = {
        "tensor by tensor": ((), ()),
        "token by channel": ((7, 1), (24, 1)),
        "group by block": ((7, 3), (3, 3)),
        "token by group": ((7, 1), (24, 6)),
    }

    def call(num_tokens: int, shapes: tuple[tuple[int, ...], tuple[int, ...]], code: torch.dtype) -> dict[str, Any]:
        codes = [draw(*shape, scale=40.0, dtype=torch.float32).to(code) for shape in ((num_tokens, 48), (24, 48))]
        x_scale, w_scale = (draw(*shape, scale=0.002, shift=0.01, dtype=draw.wide) for shape in shapes)
        weight = {"w_codes": codes[1], "w_scale": w_scale, "bias": bias}
        return {"x_codes": codes[0], "x_scale": x_scale, **weight, "out_dtype": draw.dtype}

    calls = {
        f"{str(code).removeprefix('torch.')}, {name}": call(7, shapes, code)
        for code in RANGES
        for name, shapes in scales.items()
    }
    for name, shapes in scales.items():
        zeros = [draw(*shape, scale=30.0, dtype=torch.float32).to(torch.int8) for shape in shapes]
        both = {"x_zero_point": zeros[0], "w_zero_point": zeros[1] if name == "token by group" else None}
        calls[f"zero points, {name}"] = {**call(7, shapes, torch.int8), **both}
    return calls | {
        "no bias": {**call(7, ((7, 1), (24, 1)), torch.int8), "bias": None},
        "no tokens": call(0, ((0, 1), (24, 1)), torch.int8),
    }


QUANTIZE = declare(
    CanonicalOp(
        schema='quantize(Tensor x, Tensor? scale, *, ScalarType dtype, str granularity="token", int group_size=0) '
        "-> (Tensor codes, Tensor scale)",
        reference=quantize,
        fake=_quantize_fake,
        check=_check_quantize,
        calls=_quantize_calls,
        seed=10,
    )
)
QUANTIZED_LINEAR = declare(
    CanonicalOp(
        schema="quantized_linear(Tensor x_codes, Tensor x_scale, Tensor w_codes, Tensor w_scale, Tensor? bias, *, "
        "ScalarType out_dtype, Tensor? x_zero_point=None, Tensor? w_zero_point=None) -> Tensor",
        reference=quantized_linear,
        fake=_linear_fake,
        check=_check_linear,
        calls=_linear_calls,
        seed=11,
    )
)
