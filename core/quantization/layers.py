"""Quantised linear layers: modules whose forward is the canonical ops, so that a traced graph holds just these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

import core.common.ops.canonical  # noqa: F401  # declares the ops that these layers call
from core.common.ops.linear.weight_only import CODES_PER_WORD, unpacked
from core.quantization.scheme import QuantizationScheme
from core.quantization.weights import dequantize_weight


class QuantizedModule(nn.Module):
    """Base of quantised layers: codes, scales and zero points keep their dtype when the model is cast."""

    #: The parameters that casts change, such as biases.
    cast: tuple[str, ...] = ("bias",)
    #: How the layer is quantised.
    scheme: QuantizationScheme
    #: Whether inputs stay unquantised; set by the context `continuous`.
    continuous = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight that was quantised."""
        raise NotImplementedError

    def values(self) -> tuple[Tensor, ...]:
        """Return the dequantised weights, fp32, in the order of the original layer's parameters."""
        raise NotImplementedError

    def _hold(self, **tensors: Tensor | None) -> None:
        """Register each tensor as a parameter that takes no gradient.

        Parameters stay one object when they are moved, so layers that share an input scale go on sharing it.
        """
        for name, tensor in tensors.items():
            held = tensor if tensor is None or isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
            self.register_parameter(name, held)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        castable = {id(self._parameters.get(name)) for name in self.cast}

        def keep(tensor: Tensor) -> Tensor:
            if id(tensor) in castable or not tensor.is_floating_point():
                return fn(tensor)
            # A cast leaves integers unchanged, so viewing the bits as integers lets a tensor be moved but not cast.
            bits = torch.int32 if tensor.dtype.itemsize == 4 else torch.uint8
            return fn(tensor.view(bits)).view(tensor.dtype)

        return super()._apply(keep, recurse)  # type: ignore[no-any-return,no-untyped-call]  # torch's is not annotated


def is_quantized(model: nn.Module) -> bool:
    """Tell whether a layer of the model holds codes."""
    return any(isinstance(module, QuantizedModule) for module in model.modules())


class CodedLinear(QuantizedModule):
    """Base of both linear layers: a weight (N, K) of codes, its scales and zero points, and a bias."""

    #: Codes (N, K) int8 or fp8, or packed int32 (N, ceil(K / 8)) for 4 bits.
    weight: Tensor
    #: (N, G) fp32, one for each group of K / G neighbours.
    weight_scale: Tensor
    #: (N, G) int8; None for symmetric codes.
    weight_zero_point: Tensor | None
    #: (N,) in the model's dtype.
    bias: Tensor | None

    def __init__(
        self,
        scheme: QuantizationScheme,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        weight_zero_point: Tensor | None = None,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[1] if in_features is None else in_features
        self._num_bits = scheme.weights.num_bits
        self._hold(weight=weight, weight_scale=weight_scale, weight_zero_point=weight_zero_point, bias=bias)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(N, K)."""
        return self.out_features, self.in_features

    def values(self) -> tuple[Tensor, ...]:
        """Return the weight (N, K) fp32."""
        codes = unpacked(self.weight, self._num_bits, self.in_features)
        return (dequantize_weight(codes, self.weight_scale, self.weight_zero_point),)

    def extra_repr(self) -> str:
        """Describe the layer as `torch.nn.Linear` does."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, scheme={self.scheme.name}"


class QuantizedLinear(CodedLinear):
    """A linear layer that multiplies codes by codes: quantises its input (..., K), returns (..., N) in its dtype."""

    #: () fp32 for a static scheme.
    input_scale: Tensor | None
    #: () int8 for a static scheme with zero points.
    input_zero_point: Tensor | None

    def __init__(
        self,
        *args: Any,
        input_scale: Tensor | None = None,
        input_zero_point: Tensor | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._hold(input_scale=input_scale, input_zero_point=input_zero_point)
        inputs = self.scheme.activations
        assert inputs is not None  # else it is a WeightOnlyLinear
        self._symmetric = inputs.symmetric
        self._quantize: dict[str, Any] = {"dtype": inputs.dtype, "granularity": inputs.granularity}

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (..., N) for x (..., K)."""
        ops = torch.ops.core
        y: Tensor
        if self.continuous:
            y = ops.weight_only_linear(x, self.weight, self.weight_scale, self.weight_zero_point, self.bias)
            return y
        zeros = {} if self.weight_zero_point is None else {"w_zero_point": self.weight_zero_point}
        if self._symmetric:
            codes, scale = ops.quantize(x, self.input_scale, **self._quantize)
        else:
            codes, scale, zeros["x_zero_point"] = ops.quantize_asymmetric(
                x, self.input_scale, self.input_zero_point, **self._quantize
            )
        y = ops.quantized_linear(codes, scale, self.weight, self.weight_scale, self.bias, out_dtype=x.dtype, **zeros)
        return y


class WeightOnlyLinear(CodedLinear):
    """A linear layer whose weight alone is quantised: (..., K) floating -> (..., N)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (..., N) for x (..., K)."""
        y: Tensor = torch.ops.core.weight_only_linear(
            x, self.weight, self.weight_scale, self.weight_zero_point, self.bias, num_bits=self._num_bits
        )
        return y


def rounds_inputs(model: nn.Module) -> bool:
    """Tell whether a layer of the model quantises its input."""
    return any(
        isinstance(module, QuantizedModule) and module.scheme.activations is not None and not module.continuous
        for module in model.modules()
    )


@contextmanager
def continuous(model: nn.Module) -> Iterator[None]:
    """Let the quantised layers of a model take unquantised inputs within the context.

    Quantisation turns tiny differences into whole steps. Without it, two equivalent ways to run the model agree up to
    rounding.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    for layer in layers:
        layer.continuous = True
    try:
        yield
    finally:
        for layer in layers:
            del layer.continuous


def share_input_scales(model: nn.Module) -> None:
    """Let the layers of each parent whose static input scales are equal hold one and the same tensor.

    Layers that quantise one input by one tensor do the same computation, which passes may then join.
    """
    for parent in model.modules():
        shared: dict[tuple[Any, ...], tuple[nn.Parameter | None, ...]] = {}
        for layer in parent.children():
            if isinstance(layer, QuantizedLinear) and layer.input_scale is not None:
                held = tuple(layer._parameters[name] for name in ("input_scale", "input_zero_point"))
                key = (layer.scheme.activations, *(None if each is None else each.item() for each in held))
                layer.input_scale, layer.input_zero_point = shared.setdefault(key, held)


def num_weights(model: nn.Module) -> int:
    """Return how many parameters a model has, not counting scales; packed codes count one by one."""
    counts: dict[int, int] = {}  # each tensor once, wherever it is shared
    for module in model.modules():
        quantized = isinstance(module, QuantizedModule)
        for name, parameter in module.named_parameters(recurse=False):
            counts[id(parameter)] = num_values(name, parameter) if quantized else parameter.numel()
    return sum(counts.values())


def num_values(name: str, parameter: Tensor) -> int:
    """Return how many parameters of the original model a quantised layer's parameter stands for: 0 for scales."""
    if name.endswith(("_scale", "_zero_point")):
        return 0
    return parameter.numel() * (CODES_PER_WORD if parameter.dtype == torch.int32 else 1)
