"""The module that replaces transformers' stacked experts: a mixture's experts with quantised weights.

Shapes: T tokens, k experts per token, E experts, D hidden size, I intermediate size of one expert. Rows are sorted by
expert, so that two `core::quantized_grouped_linear` do the work, as fast as a device's grouped product is. The gate, or
the activation of experts without one, stands between them in plain torch, and with the second quantisation the gate is
fused as in any other MLP; one op around all of it would hide both from the passes, and weights dequantised for the
unquantised path would be read three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import core.common.ops.canonical  # noqa: F401  # declares the ops that the experts call
from core.common.ops.linear.weight_only import unpacked
from core.errors import UsageError
from core.quantization.layers import QuantizedModule
from core.quantization.scheme import QuantizationScheme
from core.quantization.targets import expert_weights
from core.quantization.weights import Weight, dequantize_weight

HIDDEN = ".hidden"
"""Appended to the path of an experts module: names the inputs of its down projections."""


class QuantizedExperts(QuantizedModule):
    """MLPs of E experts on codes, with a gate or without; weights of each expert by output channel or group.

    gate_up_proj (E, 2 * I, D), or up_proj (E, I, D) without a gate, and down_proj (E, D, I) codes, each with `_scale`
    and `_zero_point`; input_scale and hidden_scale () fp32, of the inputs of the two projections, for a static scheme:
    one for all experts.
    """

    cast = ()
    # As transformers says of the experts that these replace.
    is_transposed, is_concatenated = False, True
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    hidden_scale: Tensor | None
    hidden_zero_point: Tensor | None

    def __init__(
        self,
        scheme: QuantizationScheme,
        up: Weight,
        down: Weight,
        act_fn: Callable[[Tensor], Tensor],
        *,
        has_gate: bool = True,
        inputs: tuple[Tensor | None, Tensor | None] = (None, None),
        hidden: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        super().__init__()
        self.scheme, self.act_fn, self.has_gate = scheme, act_fn, has_gate
        self.num_experts, self.hidden_dim = down.codes.shape[:2]
        self.up_name = "gate_up_proj" if has_gate else "up_proj"
        for name, weight in ((self.up_name, up), ("down_proj", down)):
            held = {name: weight.codes, f"{name}_scale": weight.scale, f"{name}_zero_point": weight.zero_point}
            self._hold(**held)
        self._hold(input_scale=inputs[0], input_zero_point=inputs[1])
        self._hold(hidden_scale=hidden[0], hidden_zero_point=hidden[1])
        self._num_bits = scheme.weights.num_bits
        activations = scheme.activations
        self._symmetric = activations is None or activations.symmetric
        self._quantize: dict[str, Any] | None = None
        if activations is not None:
            self._quantize = {"dtype": activations.dtype, "granularity": activations.granularity}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (T, D): the weighted sum of the chosen experts' MLPs. Index and weights (T, k); index E: none."""
        x = hidden_states.reshape(-1, self.hidden_dim)
        top_k = top_k_index.shape[-1]
        elsewhere = (top_k_index < 0) | (top_k_index >= self.num_experts)
        experts, order = torch.sort(torch.where(elsewhere, self.num_experts, top_k_index).flatten(), stable=True)
        each = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(experts, each, right=True, out_int32=True)
        rows = order // top_k
        hidden = self._project(self.up_name, self._codes(x, self.input_scale, self.input_zero_point), ends, rows, x)
        hidden = _activated(self, hidden)
        codes = self._codes(hidden, self.hidden_scale, self.hidden_zero_point)
        out = self._project("down_proj", codes, ends, None, x)
        places = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
        slots = out[places].view(-1, top_k, self.hidden_dim) * top_k_weights.reshape(-1, top_k)[..., None]
        return slots.sum(1).to(x.dtype).view(hidden_states.shape)

    def _codes(
        self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return x as codes with scale and zero point; as it is where only weights are quantised."""
        if self._quantize is None or self.continuous:
            return x, None, None
        if self._symmetric:
            codes, used = torch.ops.core.quantize(x, scale, **self._quantize)
            return codes, used, None
        codes, used, zero = torch.ops.core.quantize_asymmetric(x, scale, zero_point, **self._quantize)
        return codes, used, zero

    def _project(
        self,
        name: str,
        inputs: tuple[Tensor, Tensor | None, Tensor | None],
        ends: Tensor,
        rows: Tensor | None,
        like: Tensor,
    ) -> Tensor:
        """Multiply by the experts' own weights. rows: the input of each row; None where inputs are sorted already."""
        x, scale, zero_point = (
            each if each is None or rows is None or each.dim() == 0 else each[rows] for each in inputs
        )
        assert x is not None
        y: Tensor = torch.ops.core.quantized_grouped_linear(
            x,
            scale,
            ends,
            getattr(self, name),
            getattr(self, f"{name}_scale"),
            getattr(self, f"{name}_zero_point"),
            out_dtype=like.dtype,
            num_bits=self._num_bits,
            x_zero_point=zero_point,
        )
        return y

    @property
    def intermediate_dim(self) -> int:
        """I."""
        return self.weight_shape[1] // (2 if self.has_gate else 1)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(E, 2 * I, D), or (E, I, D) without a gate, of the first weight."""
        codes: Tensor = getattr(self, self.up_name)
        return self.num_experts, codes.shape[1], self.hidden_dim

    def weight(self, name: str) -> Weight:
        """Return the weight `gate_up_proj`, or `up_proj` without a gate, or `down_proj`."""
        return Weight(
            codes=getattr(self, name),
            scale=getattr(self, f"{name}_scale"),
            zero_point=getattr(self, f"{name}_zero_point"),
        )

    def values(self) -> tuple[Tensor, ...]:
        """Return the weights in fp32: of `weight_shape`, and (E, D, I)."""
        inputs = {self.up_name: self.hidden_dim, "down_proj": self.intermediate_dim}
        weights = {name: self.weight(name) for name in inputs}
        return tuple(
            dequantize_weight(unpacked(w.codes, self._num_bits, inputs[name]), w.scale, w.zero_point)
            for name, w in weights.items()
        )

    def extra_repr(self) -> str:
        """Describe the sizes and the scheme."""
        return f"{self.num_experts} experts, {self.hidden_dim} -> {self.intermediate_dim}, scheme={self.scheme.name}"


def check_experts(name: str, experts: Any) -> None:
    """Raise `UsageError`, naming the layer, unless it is MLPs stacked as Mixtral's are, or Nemotron-H's without a
    gate."""
    names = expert_weights(experts)
    assert names is not None
    up, down = (getattr(experts, each) for each in names)
    gated, problem = getattr(experts, "has_gate", True), ""
    if getattr(experts, "is_transposed", False) or up.shape[1:] != (down.shape[2] * (1 + gated), down.shape[1]):
        problem = "its weights are stored as (experts, inputs, outputs)"
    elif hasattr(experts, f"{names[0]}_bias"):
        problem = "its experts have biases"
    elif getattr(experts, "has_post_expert_norm", False) or not callable(getattr(experts, "act_fn", None)):
        problem = "its experts are no plain MLPs"
    elif gated and not _has_plain_gate(experts):
        problem = "its gate is not act(gate) * up of the two halves"
    if problem:
        raise UsageError(
            f"quantise layer {name!r}, a {type(experts).__name__}",
            found=f"{problem}; there is no quantised form of that",
            remedy=f"leave it out: ignore=[{name!r}], or 're:.*experts$' for all of them",
        )


def _has_plain_gate(experts: Any) -> bool:
    """Test it numerically: architectures override the gate with clamps, offsets or another order of the halves."""
    act, gate = experts.act_fn, getattr(experts, "_apply_gate", None)
    if gate is None:
        return True
    width = 2 * experts.down_proj.shape[2]
    probe = torch.linspace(-40.0, 40.0, 4 * width, device="cpu").view(width, 4).t().contiguous()
    first, second = probe.chunk(2, dim=-1)
    return bool(torch.equal(gate(probe), act(first) * second))


def hidden_of(experts: Any, hidden_states: Tensor, top_k_index: Tensor) -> Iterator[Tensor]:
    """Yield the input of each chosen expert's down projection, computed with the weights before quantising."""
    names = expert_weights(experts)
    assert names is not None
    for expert, weight in enumerate(getattr(experts, names[0])):
        tokens = (top_k_index == expert).any(-1).nonzero()[:, 0]
        if tokens.numel():
            yield _activated(experts, nn.functional.linear(hidden_states[tokens], weight))


def _activated(experts: Any, hidden: Tensor) -> Tensor:
    """Return what the down projection multiplies, (..., I), of what the first one gives."""
    act: Callable[[Tensor], Tensor] = experts.act_fn
    if not getattr(experts, "has_gate", True):
        return act(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return act(gate) * up
