"""Quantised layers from a model's own: one function by kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.quantization.calibrate import Range
from core.quantization.experts import HIDDEN, QuantizedExperts, check_experts
from core.quantization.layers import QuantizedLinear, QuantizedModule, WeightOnlyLinear
from core.quantization.parts import columns_in
from core.quantization.scheme import QuantizationScheme
from core.quantization.targets import expert_weights, is_experts
from core.quantization.weights import Weight, check_weight, pack, quantize_weight


def check_layers(layers: Mapping[str, nn.Module], scheme: QuantizationScheme) -> None:
    """Raise `UsageError`, naming the layer, for the first that cannot be quantised by the scheme."""
    for name, layer in layers.items():
        if is_experts(layer):
            check_experts(name, layer)
        for weight in weights_of(layer):
            check_weight(name, weight, scheme.weights)


def weights_of(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the weights of a layer that quantising replaces."""
    names = expert_weights(layer) or ("weight",)
    return tuple(getattr(layer, name) for name in names)


@torch.no_grad()
def quantized_layer(
    name: str, layer: nn.Module, scheme: QuantizationScheme, ranges: Mapping[str, Range]
) -> QuantizedModule:
    """Return the quantised form of the layer at path name, on its device. ranges: of inputs, for a static scheme."""
    # Of experts that are cut by width, the last weight alone has its columns elsewhere too.
    *others, last = weights_of(layer)
    weights = [*(_quantized(each, scheme) for each in others), _quantized(last, scheme, columns_in(layer))]
    seen = ranges.get(name)
    if is_experts(layer):
        hidden = ranges.get(f"{name}{HIDDEN}")
        scales = [_static_scales(each, scheme, weights[0].codes.device) for each in (seen, hidden)]
        kind: dict[str, Any] = {"act_fn": layer.act_fn, "has_gate": getattr(layer, "has_gate", True)}
        return QuantizedExperts(scheme, weights[0], weights[1], **kind, inputs=scales[0], hidden=scales[1])
    assert isinstance(layer, nn.Linear)
    return linear_of(scheme, weights[0], layer.bias, layer.in_features, seen)


def linear_of(
    scheme: QuantizationScheme, weight: Weight, bias: Tensor | None, in_features: int, seen: Range | None
) -> QuantizedModule:
    """Return a quantised linear layer of a quantised weight (N, K), on its device. seen: its input, if static."""
    if scheme.activations is None:
        return WeightOnlyLinear(
            scheme,
            weight.codes,
            weight.scale,
            bias,
            weight_zero_point=weight.zero_point,
            in_features=in_features,
        )
    scale, zero_point = _static_scales(seen, scheme, weight.codes.device)
    return QuantizedLinear(
        scheme,
        weight.codes,
        weight.scale,
        bias,
        weight_zero_point=weight.zero_point,
        input_scale=scale,
        input_zero_point=zero_point,
    )


def _quantized(weight: Tensor, scheme: QuantizationScheme, group: str | None = None) -> Weight:
    """Return codes, scale and zero point of a weight (..., N, K), packed where they are 4 bits wide.

    group: as of `quantize_weight`.
    """
    codes, scale, zero_point = quantize_weight(weight, scheme.weights, group)
    num_bits = scheme.weights.num_bits
    return Weight(codes=pack(codes, num_bits) if num_bits < 8 else codes, scale=scale, zero_point=zero_point)


def _static_scales(
    seen: Range | None, scheme: QuantizationScheme, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if seen is None or scheme.activations is None:
        return None, None
    scale, zero_point = seen.scale(scheme.activations)
    return scale.to(device), None if zero_point is None else zero_point.to(device)
