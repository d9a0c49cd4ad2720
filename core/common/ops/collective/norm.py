"""An all-reduce with what follows it in a decoder layer: residual add, RMSNorm, quantisation of its result.

`core::all_reduce_rms_norm`, `core::all_reduce_add_rms_norm`, `core::all_reduce_add_rms_norm_quantize` and
`core::all_reduce_add_rms_norm_quantize_fp4` are the ops that their names end in, on the sum of x over the processes of
`group` (core/common/ops/collective/collectives.py); all other arguments are those of these ops. The residual is not
reduced: every process holds all of it. `group_size` is no number of processes, but of neighbours that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.collective.collectives import all_reduce, all_reduce_fake
from core.common.ops.declaration import CanonicalOp, Sample, declare
from core.common.ops.norm.norms import (
    NORM_DTYPES,
    add_rms_norm,
    add_rms_norm_samples,
    rms_norm,
    rms_norm_samples,
)
from core.common.ops.norm.quantized import (
    ADD_RMS_NORM_QUANTIZE,
    QUANTIZE_OPTIONS,
    add_rms_norm_quantize,
    add_rms_norm_quantize_fake,
)
from core.common.ops.quantize.fp4 import quantize_fp4, quantize_fp4_fake

_ADD = "Tensor x, Tensor residual, Tensor? weight, float eps"
RMS_NORM_SCHEMA = f"all_reduce_rms_norm(Tensor x, Tensor? weight, float eps, *, str group, {NORM_DTYPES}) -> Tensor"
ADD_RMS_NORM_SCHEMA = f"all_reduce_add_rms_norm({_ADD}, *, str group, {NORM_DTYPES}) -> (Tensor normed, Tensor sum)"
QUANTIZE_SCHEMA = (
    f"all_reduce_add_rms_norm_quantize({_ADD}, Tensor? scale, *, str group, {QUANTIZE_OPTIONS}, {NORM_DTYPES}) "
    "-> (Tensor codes, Tensor scale, Tensor sum)"
)
QUANTIZE_FP4_SCHEMA = (
    f"all_reduce_add_rms_norm_quantize_fp4({_ADD}, Tensor? scale, *, str group, {NORM_DTYPES}) "
    "-> (Tensor codes, Tensor group_scales, Tensor scale, Tensor sum)"
)


def all_reduce_rms_norm(x: Tensor, *norm: Any, group: str, **options: Any) -> Tensor:
    """Return `core::rms_norm` of the sum of x."""
    return rms_norm(all_reduce(x, group), *norm, **options)


def all_reduce_add_rms_norm(x: Tensor, *norm: Any, group: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return `core::add_rms_norm` of the sum of x: what is normalised, and that sum with the residual."""
    return add_rms_norm(all_reduce(x, group), *norm, **options)


def all_reduce_add_rms_norm_quantize(
    x: Tensor, *norm: Any, group: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `core::add_rms_norm_quantize` of the sum of x: codes, their scale, and that sum with the residual."""
    return add_rms_norm_quantize(all_reduce(x, group), *norm, **options)


def all_reduce_add_rms_norm_quantize_fp4(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, *, group: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (codes, group_scales, scale, sum): `core::quantize_fp4` of the norm, and the sum with the residual."""
    normed, total = add_rms_norm(all_reduce(x, group), residual, weight, eps, **options)
    return *quantize_fp4(normed, scale), total


# The fakes are those of the parts: strides of a norm's results follow its input, which a reduction makes contiguous.
def _fake_of(following: Callable[..., Any], x: Tensor, *norm: Any, group: str, **options: Any) -> Any:
    return following(all_reduce_fake(x, group), *norm, **options)


def _quantize_fp4_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, *, group: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, total = add_rms_norm(all_reduce_fake(x, group), residual, weight, eps, **options)
    return *quantize_fp4_fake(normed, scale), total


_KEPT = (
    *("odd rows", "no tokens", "rank 4", "slice of wider rows", "transposed heads", "large values", "wide residual"),
    *("olmo2", "gemma", "no weight", "fp8, one scale, given scale"),
)
"""Beginnings of the names of samples that a reduction before the op makes worth testing again."""


def _grouped(samples: Iterable[Sample], **more: Any) -> Iterator[Sample]:
    """Yield some of the samples of the op without the reduction, for the default group."""
    for sample in samples:
        if sample.name.startswith(_KEPT):
            yield Sample(name=sample.name, kwargs={**sample.kwargs, "group": "", **more})


def _rms_norm_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    return _grouped(rms_norm_samples(dtype, device))


def _add_rms_norm_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    return _grouped(add_rms_norm_samples(dtype, device))


def _quantize_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    return _grouped(ADD_RMS_NORM_QUANTIZE.samples(dtype, device))


def _quantize_fp4_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    scale = torch.tensor(0.0017, dtype=at_least_fp32(dtype), device=device)
    for index, sample in enumerate(add_rms_norm_samples(dtype, device)):
        yield from _grouped([sample], scale=scale if index % 2 else None)


ALL_REDUCE_RMS_NORM = declare(
    CanonicalOp(
        name="all_reduce_rms_norm",
        schema=RMS_NORM_SCHEMA,
        reference=all_reduce_rms_norm,
        fake=partial(_fake_of, rms_norm),
        samples=_rms_norm_samples,
        break_point=True,
    )
)
ALL_REDUCE_ADD_RMS_NORM = declare(
    CanonicalOp(
        name="all_reduce_add_rms_norm",
        schema=ADD_RMS_NORM_SCHEMA,
        reference=all_reduce_add_rms_norm,
        fake=partial(_fake_of, add_rms_norm),
        samples=_add_rms_norm_samples,
        break_point=True,
    )
)
ALL_REDUCE_ADD_RMS_NORM_QUANTIZE = declare(
    CanonicalOp(
        name="all_reduce_add_rms_norm_quantize",
        schema=QUANTIZE_SCHEMA,
        reference=all_reduce_add_rms_norm_quantize,
        fake=partial(_fake_of, add_rms_norm_quantize_fake),
        samples=_quantize_samples,
        break_point=True,
    )
)
ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4 = declare(
    CanonicalOp(
        name="all_reduce_add_rms_norm_quantize_fp4",
        schema=QUANTIZE_FP4_SCHEMA,
        reference=all_reduce_add_rms_norm_quantize_fp4,
        fake=_quantize_fp4_fake,
        samples=_quantize_fp4_samples,
        break_point=True,
    )
)
