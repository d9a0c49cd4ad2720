"""`core::gated_activation_quantize`: the gate of a gated MLP whose product is only needed as codes.

Shapes: gate and up (..., I), or both halves in one tensor (..., 2 * I); codes (..., I), contiguous; scales as
`core::quantize` has them. It is the gate of core/common/ops/mlp/activation.py, rounded as there, and then
`core::quantize`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, check
from core.common.ops.declaration import CanonicalOp, Sample, declare
from core.common.ops.mlp.activation import fused_samples, gated_activation, gated_activation_fused, samples
from core.common.ops.norm.quantized import QUANTIZE_OPTIONS, in_each_form, in_turn
from core.common.ops.quantize.symmetric import quantize, quantize_fake

SCHEMA = (
    f"gated_activation_quantize(Tensor gate, Tensor? up, Tensor? scale, *, str kind, {QUANTIZE_OPTIONS}, "
    "bool gate_first=True, bool interleaved=False, float limit=0.0, float up_offset=0.0) "
    "-> (Tensor codes, Tensor scale)"
)


def gated_activation_quantize(
    gate: Tensor,
    up: Tensor | None,
    scale: Tensor | None,
    *,
    kind: str,
    dtype: torch.dtype,
    granularity: str = "token",
    group_size: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return (codes, scale) of `core::quantize` of `core::gated_activation`; of its fused form where up is None.

    gate: without up both halves, laid out as gate_first and interleaved say; these mean nothing else. scale, dtype,
    granularity, group_size: as `core::quantize` takes them.
    """
    product = _product(gate, up, kind, options)
    return quantize(product, scale, dtype=dtype, granularity=granularity, group_size=group_size)


def gated_activation_quantize_fake(
    gate: Tensor,
    up: Tensor | None,
    scale: Tensor | None,
    *,
    kind: str,
    dtype: torch.dtype,
    granularity: str = "token",
    group_size: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Check the arguments; return codes of the product's shape and one scale per region."""
    product = _product(gate, up, kind, options)
    return quantize_fake(product, scale, dtype=dtype, granularity=granularity, group_size=group_size)


def _product(gate: Tensor, up: Tensor | None, kind: str, options: Mapping[str, Any]) -> Tensor:
    if up is None:
        return gated_activation_fused(gate, kind=kind, **options)
    rest = dict(options)
    plain = rest.pop("gate_first", True) and not rest.pop("interleaved", False)
    check(plain, "gated_activation_quantize", "gate_first and interleaved say how one tensor holds both, and up is one")
    return gated_activation(gate, up, kind=kind, **rest)


_GROUPS = (8, 10)


def gated_activation_quantize_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every form of codes with one gate, and every gate of one tensor and of two with one form."""
    first, *others = fused_samples(dtype, device)
    whole = (*in_each_form(first, Draw(dtype, device, seed=23), 40, _GROUPS), *in_turn(others, _GROUPS))
    for sample in whole:
        kwargs = dict(sample.kwargs)
        yield Sample(name=sample.name, kwargs={"gate": kwargs.pop("gate_up"), "up": None, **kwargs})
    for sample in in_turn(samples(dtype, device), _GROUPS):
        yield Sample(name=f"two tensors, {sample.name}", kwargs=sample.kwargs)


GATED_ACTIVATION_QUANTIZE = declare(
    CanonicalOp(
        name="gated_activation_quantize",
        schema=SCHEMA,
        reference=gated_activation_quantize,
        fake=gated_activation_quantize_fake,
        samples=gated_activation_quantize_samples,
    )
)
