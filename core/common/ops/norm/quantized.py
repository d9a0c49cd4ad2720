"""`core::rms_norm_quantize`, `core::add_rms_norm_quantize`: an RMSNorm whose result is only needed as codes.

Shapes: x (..., D); codes (..., D), contiguous; scales as `core::quantize` has them. Each op is the norm of
core/common/ops/norm/norms.py followed by `core::quantize` of what it gives, rounded where both say: the normed
values are rounded to the norm's own dtype before they are quantised, as a model does that has two ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import CanonicalOp, Sample, declare
from core.common.ops.norm.norms import NORM_DTYPES, add_rms_norm, add_rms_norm_samples, rms_norm, rms_norm_samples
from core.common.ops.quantize.symmetric import quantize, quantize_fake

QUANTIZE_OPTIONS = 'ScalarType dtype, str granularity="token", int group_size=0'
"""What `core::quantize` is told, in the schemas of ops that end in codes."""

RMS_NORM_SCHEMA = (
    "rms_norm_quantize(Tensor x, Tensor? weight, float eps, Tensor? scale, *, "
    f"{QUANTIZE_OPTIONS}, {NORM_DTYPES}) -> (Tensor codes, Tensor scale)"
)
ADD_RMS_NORM_SCHEMA = (
    "add_rms_norm_quantize(Tensor x, Tensor residual, Tensor? weight, float eps, Tensor? scale, *, "
    f"{QUANTIZE_OPTIONS}, {NORM_DTYPES}) -> (Tensor codes, Tensor scale, Tensor sum)"
)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    granularity: str = "token",
    group_size: int = 0,
    **norm: Any,
) -> tuple[Tensor, Tensor]:
    """Return (codes, scale) of `core::quantize` of `core::rms_norm`.

    scale, dtype, granularity, group_size: as `core::quantize` takes them. norm: the other arguments of
    `core::rms_norm`, by name.
    """
    normed = rms_norm(x, weight, eps, **norm)
    return quantize(normed, scale, dtype=dtype, granularity=granularity, group_size=group_size)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    granularity: str = "token",
    group_size: int = 0,
    **norm: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scale, sum): `core::quantize` of the normed result of `core::add_rms_norm`, and the sum.

    scale, dtype, granularity, group_size: as `core::quantize` takes them. norm: the other arguments of
    `core::add_rms_norm`, by name.
    """
    normed, total = add_rms_norm(x, residual, weight, eps, **norm)
    return *quantize(normed, scale, dtype=dtype, granularity=granularity, group_size=group_size), total


# The norm's fake is its reference; that of the codes is given, since torch knows no arithmetic of fp8.
def rms_norm_quantize_fake(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    granularity: str = "token",
    group_size: int = 0,
    **norm: Any,
) -> tuple[Tensor, Tensor]:
    """Check the arguments; return codes of x's shape and one scale per region."""
    normed = rms_norm(x, weight, eps, **norm)
    return quantize_fake(normed, scale, dtype=dtype, granularity=granularity, group_size=group_size)


def add_rms_norm_quantize_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    granularity: str = "token",
    group_size: int = 0,
    **norm: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments; return codes of x's shape, one scale per region, and the sum."""
    normed, total = add_rms_norm(x, residual, weight, eps, **norm)
    return *quantize_fake(normed, scale, dtype=dtype, granularity=granularity, group_size=group_size), total


_GROUPS = (16, 12)


def _forms(binary: int, odd: int) -> dict[str, Mapping[str, Any]]:
    """Return formats and granularities worth testing, by name; binary, odd: sizes of groups."""
    fp8, int8 = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.int8}
    return {
        "fp8 by token": fp8,
        "int8 by token": int8,
        f"fp8 by group of {binary}": {**fp8, "granularity": "group", "group_size": binary},
        f"int8 by group of {odd}": {**int8, "granularity": "group", "group_size": odd},
        "fp8, one scale": {**fp8, "granularity": "tensor"},
        "int8, one scale": {**int8, "granularity": "tensor"},
    }


def in_each_form(sample: Sample, draw: Draw, width: int, groups: tuple[int, int]) -> Iterator[Sample]:
    """Yield a call in each form of codes, with a scale given and without.

    sample: of the op before the codes, which gives 7 rows of `width`. groups: sizes of groups, the second no power of
    two.
    """
    for name, form in _forms(*groups).items():
        shape = quantize(torch.zeros(7, width), None, **form)[1].shape
        given = draw(*shape, scale=0.002, shift=0.02, dtype=at_least_fp32(draw.dtype))
        for scale, suffix in ((None, ""), (given, ", given scale")):
            yield Sample(name=f"{name}{suffix}", kwargs={**sample.kwargs, "scale": scale, **form})


def in_turn(samples: Iterable[Sample], groups: tuple[int, int]) -> Iterator[Sample]:
    """Yield each call of the op before the codes in one form of codes, another one in turn."""
    for sample, (name, form) in zip(samples, cycle(_forms(*groups).items()), strict=False):
        yield Sample(name=f"{sample.name}, {name}", kwargs={**sample.kwargs, "scale": None, **form})


def rms_norm_quantize_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every form of codes with one norm, and every norm with one form."""
    draw, (first, *others) = Draw(dtype, device, seed=21), rms_norm_samples(dtype, device)
    yield from in_each_form(first, draw, 48, _GROUPS)
    yield from in_turn(others, _GROUPS)


def add_rms_norm_quantize_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every norm of a sum with one form of codes, and one with a scale given."""
    first, *others = in_turn(add_rms_norm_samples(dtype, device), _GROUPS)
    yield from (first, *others)
    scale = Draw(dtype, device, seed=22)(scale=0.002, shift=0.02, dtype=at_least_fp32(dtype))
    given = {"scale": scale, "granularity": "tensor"}
    yield Sample(name="fp8, one scale, given scale", kwargs={**first.kwargs, **given})


RMS_NORM_QUANTIZE = declare(
    CanonicalOp(
        name="rms_norm_quantize",
        schema=RMS_NORM_SCHEMA,
        reference=rms_norm_quantize,
        fake=rms_norm_quantize_fake,
        samples=rms_norm_quantize_samples,
    )
)
ADD_RMS_NORM_QUANTIZE = declare(
    CanonicalOp(
        name="add_rms_norm_quantize",
        schema=ADD_RMS_NORM_SCHEMA,
        reference=add_rms_norm_quantize,
        fake=add_rms_norm_quantize_fake,
        samples=add_rms_norm_quantize_samples,
    )
)
