"""Quantisation schemes as data, by name: how a layer's weights and activations are quantised.

A name is a key of `SCHEMES`. The name of a weight-only scheme may end in a group size: `w4a16-g32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from core.quantization.names import split_name

FP8 = torch.float8_e4m3fn
"""The only fp8 format of weights and activations; largest value 448."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScheme:
    """How a weight (N, K) is quantised."""

    #: The dtype of the codes. Codes of 4 bits are int8 here; stored weights pack them.
    dtype: torch.dtype
    num_bits: int = 8
    #: The region of one scale: "channel" (a row) or "group" (neighbours in a row).
    granularity: str = "channel"
    #: Neighbours in a group.
    group_size: int = 0
    #: Whether there are no zero points. Otherwise each scale has one: value = (code - zero point) * scale.
    symmetric: bool = True

    @property
    def code_range(self) -> tuple[float, float]:
        """Smallest and largest code."""
        if self.dtype == FP8:
            return -448.0, 448.0
        return -(2.0 ** (self.num_bits - 1)), 2.0 ** (self.num_bits - 1) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScheme:
    """How a layer's input (..., K) is quantised."""

    dtype: torch.dtype
    #: The region of one scale: "token" (dynamic only) or "tensor".
    granularity: str = "token"
    #: Whether scales are computed from the input itself; otherwise they are calibrated.
    dynamic: bool = True
    #: As in `WeightScheme`. The codes of an asymmetric scheme are int8.
    symmetric: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScheme:
    """Weights and activations of a layer."""

    name: str
    weights: WeightScheme
    #: None where only weights are quantised.
    activations: ActivationScheme | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether ranges of activations have to be observed before layers can be quantised."""
        return self.activations is not None and not self.activations.dynamic


_FP8, _INT8 = WeightScheme(dtype=FP8), WeightScheme(dtype=torch.int8)
_TOKEN8 = ActivationScheme(dtype=torch.int8)
_TENSOR8 = ActivationScheme(dtype=torch.int8, granularity="tensor", dynamic=False)
_INT4 = WeightScheme(dtype=torch.int8, num_bits=4, granularity="group", group_size=128)

SCHEMES: Mapping[str, QuantizationScheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            QuantizationScheme(name="fp8", weights=_FP8, activations=ActivationScheme(dtype=FP8)),
            QuantizationScheme(
                name="fp8-static",
                weights=_FP8,
                activations=ActivationScheme(dtype=FP8, granularity="tensor", dynamic=False),
            ),
            QuantizationScheme(name="int8", weights=_INT8, activations=_TOKEN8),
            QuantizationScheme(name="int8-static", weights=_INT8, activations=_TENSOR8),
            QuantizationScheme(name="int8-asymmetric", weights=_INT8, activations=replace(_TOKEN8, symmetric=False)),
            QuantizationScheme(
                name="int8-static-asymmetric", weights=_INT8, activations=replace(_TENSOR8, symmetric=False)
            ),
            QuantizationScheme(name="w8a16", weights=_INT8),
            QuantizationScheme(name="w4a16", weights=_INT4),
            QuantizationScheme(name="w4a16-asymmetric", weights=replace(_INT4, symmetric=False)),
        )
    }
)
"""Schemes by name. Weights of 8 bits have one scale per channel, weights of 4 bits one per group of 128."""


def find_scheme(scheme: str | QuantizationScheme) -> QuantizationScheme:
    """Return the scheme of a name, or the scheme given; raise `UsageError` with the known names for another name."""
    if isinstance(scheme, QuantizationScheme):
        return scheme
    name, group_size = split_name(scheme)
    found = SCHEMES[name]
    if not group_size:
        return found
    weights = replace(found.weights, granularity="group", group_size=group_size)
    return replace(found, name=scheme, weights=weights)
