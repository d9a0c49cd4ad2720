"""`core::rms_norm`, `core::add_rms_norm`, `core::layer_norm`: normalisation over the last dimension.

Shapes: x (..., D) with any leading dimensions and strides, weight and bias (D,). Results have x's shape and the strides
that elementwise torch ops give: dense, in the order of x's own.

RMSNorm is Zhang & Sennrich, arXiv 1910.07467; layer norm is Ba et al., arXiv 1607.06450. Models differ in where they
round, which in half precision changes most elements; the dtype arguments say where:

    compute_dtype  x is cast to it first, and the statistics are taken in it
    normed_dtype   the normalised x is rounded to it before the weight
    weight_dtype   the weight is cast to it before `offset` is added
    out_dtype      the result is cast to it

    Llama, Qwen, Mistral  normed_dtype=x.dtype, out_dtype=promotion of x and weight
    OLMo 2, gpt-oss       no arguments: weight applied in fp32, then one cast
    Helium                weight_dtype=float32 (the same bits as OLMo 2, unless the weight is fp64)
    Gemma 1 to 3          weight_dtype=float32, offset=1.0
    Gemma 3n, Gemma 4     weight_dtype=float32
    nanochat, Llama 4 qk  weight=None
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare

_ROUNDING = (
    "float offset=0.0, ScalarType? compute_dtype=None, ScalarType? normed_dtype=None, ScalarType? weight_dtype=None, "
    "ScalarType? out_dtype=None"
)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    normed_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * (weight + offset)`, rounded where the dtype arguments say.

    compute_dtype defaults to fp32 (fp64 for fp64 x); normed_dtype to no rounding; weight_dtype to the weight's own;
    out_dtype to x's. offset is added to the weight only; without a weight it has no effect.
    """
    wide = x.to(compute_dtype or at_least_fp32(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if normed_dtype is not None:
        normed = normed.to(normed_dtype)
    if weight is not None:
        factor = weight if weight_dtype is None else weight.to(weight_dtype)
        normed = normed * (factor + offset if offset else factor)
    return normed.to(out_dtype or x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **rounding: Any
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(sum), sum) where sum = x + residual, rounded to their common dtype before it is normalised.

    residual has x's shape. The other arguments are those of `rms_norm`; out_dtype defaults to the dtype of sum.
    """
    total = x + residual
    return rms_norm(total, weight, eps, **rounding), total


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` with the biased variance, rounded once at the end.

    x, weight and bias are cast to compute_dtype first, by default fp32 (fp64 for fp64 x); out_dtype defaults to x's.
    """
    compute = compute_dtype or at_least_fp32(x.dtype)
    scale, shift = (None if t is None else t.to(compute) for t in (weight, bias))
    return functional.layer_norm(x.to(compute), x.shape[-1:], scale, shift, eps).to(out_dtype or x.dtype)


def _check_norm(op: str, x: Tensor, **per_channel: Tensor | None) -> None:
    check_floating(op, x=x, **per_channel)
    check(x.dim() >= 1, op, "x must have rank 1 or more")
    check_shape(op, (x.shape[-1],), **per_channel)


def _check_rms_norm(x: Tensor, weight: Tensor | None, *_: Any, **__: Any) -> None:
    _check_norm("rms_norm", x, weight=weight)


def _check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, *_: Any, **__: Any) -> None:
    _check_norm("add_rms_norm", x, weight=weight)
    check_floating("add_rms_norm", residual=residual)
    check_shape("add_rms_norm", tuple(x.shape), residual=residual)


def _check_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, **__: Any) -> None:
    _check_norm("layer_norm", x, weight=weight, bias=bias)


def _rows(draw: Draw) -> dict[str, Tensor]:
    """Return forms of x worth testing, all with rows of 48."""
    return {
        "odd rows": draw(7, 48),
        "no tokens": draw(0, 48),
        "one token": draw(1, 1, 48),
        "rank 4": draw(2, 3, 5, 48),
        "slice of wider rows": draw(5, 144)[:, 48:96],
        "transposed heads": draw(2, 5, 3, 48).transpose(1, 2),
        "large values": draw(5, 48, scale=3e3),
        "tiny values": draw(5, 48, scale=1e-4),
    }


def _rounding(draw: Draw) -> dict[str, Mapping[str, Any]]:
    """Return weight, eps and rounding as model families have them."""
    weight = {"weight": draw(48, scale=0.4, shift=1.0)}
    wide = {"weight": draw(48, scale=0.4, shift=1.0, dtype=draw.wide)}
    near_zero = {"weight": draw(48, scale=0.4)}
    return {
        "llama": {**weight, "eps": 1e-5, "normed_dtype": draw.dtype},
        "llama, wide weight": {**wide, "eps": 1e-6, "normed_dtype": draw.dtype, "out_dtype": draw.wide},
        "olmo2": {**weight, "eps": 3e-4},
        "olmo2, wide weight": {**wide, "eps": 1e-6},
        "gemma": {**near_zero, "eps": 1e-6, "offset": 1.0, "weight_dtype": draw.wide},
        "no weight": {"weight": None, "eps": 1.5625e-7},
        "all in x's dtype": {**weight, "eps": 1e-5, "compute_dtype": draw.dtype},
    }


def _rms_norm_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every form of x with one kind of rounding, and every kind of rounding with one form of x."""
    weight = draw(48, scale=0.4, shift=1.0)
    llama = {"weight": weight, "eps": 1e-5, "normed_dtype": draw.dtype}
    calls = {name: {"x": x, **llama} for name, x in _rows(draw).items()}
    return calls | {name: {"x": draw(9, 48), **options} for name, options in _rounding(draw).items()}


def _add_rms_norm_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the same with a residual, and a residual wider than x."""
    weight = draw(48, scale=0.4, shift=1.0)
    calls = {
        name: {"x": x, "residual": draw(*x.shape), "weight": weight, "eps": 1e-5} for name, x in _rows(draw).items()
    }
    for name, options in _rounding(draw).items():
        calls[name] = {"x": draw(9, 48), "residual": draw(9, 48), **options}
    wide = draw(9, 48, dtype=draw.wide)
    return calls | {"wide residual": {"x": draw(9, 48), "residual": wide, "weight": weight, "eps": 1e-6}}


def _layer_norm_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every form of x, with and without weight and bias."""
    weight, bias = draw(48, scale=0.4, shift=1.0), draw(48)
    calls = {name: {"x": x, "weight": weight, "bias": bias, "eps": 1e-5} for name, x in _rows(draw).items()}
    shifted = draw(9, 48, shift=5.0)
    return calls | {
        "no bias": {"x": shifted, "weight": weight, "bias": None, "eps": 1e-6},
        "neither": {"x": shifted, "weight": None, "bias": None, "eps": 3e-4},
    }


# The fakes are the references: strides follow x, and only the same ops on fake tensors give exactly those.
RMS_NORM = declare(
    CanonicalOp(
        schema=f"rms_norm(Tensor x, Tensor? weight, float eps, *, {_ROUNDING}) -> Tensor",
        reference=rms_norm,
        fake=rms_norm,
        check=_check_rms_norm,
        calls=_rms_norm_calls,
        seed=1,
    )
)
ADD_RMS_NORM = declare(
    CanonicalOp(
        schema=f"add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, *, {_ROUNDING}) "
        "-> (Tensor normed, Tensor sum)",
        reference=add_rms_norm,
        fake=add_rms_norm,
        check=_check_add_rms_norm,
        calls=_add_rms_norm_calls,
        seed=2,
    )
)
LAYER_NORM = declare(
    CanonicalOp(
        schema="layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, *, ScalarType? compute_dtype=None, "
        "ScalarType? out_dtype=None) -> Tensor",
        reference=layer_norm,
        fake=layer_norm,
        check=_check_layer_norm,
        calls=_layer_norm_calls,
        seed=3,
    )
)
