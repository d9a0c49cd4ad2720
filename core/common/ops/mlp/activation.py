"""`core::gated_activation`, `core::gated_activation_fused`: the gate of a gated MLP, `act(gate) * up`.

Shapes: gate and up (..., I); gate_up (..., 2 * I), I the intermediate size. Source: Shazeer, arXiv 2002.05202.

Rounding is eager's: act is computed and rounded in the gate's dtype, then multiplied with up. By kind:

    silu       x * sigmoid(x)                        Llama, Qwen, DeepSeek
    gelu       x * Phi(x)                            the error-function form
    gelu_tanh  its tanh approximation                Gemma
    gelu_new   the same, rounded after every step    T5 v1.1, and whoever writes the formula out
    quick_gelu x * sigmoid(1.702 * x)                gpt-oss, with limit=7.0 and up_offset=1.0
    relu, relu2 (its square), sigmoid
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check, check_choice, check_floating
from core.common.ops.declaration import CanonicalOp, Sample, declare


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "gelu_new": _gelu_new,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": torch.relu,
        "relu2": lambda x: torch.square(torch.relu(x)),
        "sigmoid": torch.sigmoid,
    }
)

SCHEMA = "gated_activation(Tensor gate, Tensor up, *, str kind, float limit=0.0, float up_offset=0.0) -> Tensor"
FUSED_SCHEMA = (
    "gated_activation_fused(Tensor gate_up, *, str kind, bool gate_first=True, bool interleaved=False, "
    "float limit=0.0, float up_offset=0.0) -> Tensor"
)


def gated_activation(gate: Tensor, up: Tensor, *, kind: str, limit: float = 0.0, up_offset: float = 0.0) -> Tensor:
    """Return `act(gate) * (up + up_offset)`, of the shape of both and their common dtype.

    limit, unless 0: gate is cut off above it and up at both sides of zero, before anything else.
    """
    check_floating("gated_activation", gate=gate, up=up)
    shapes = f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape"
    check(gate.shape == up.shape, "gated_activation", shapes)
    check_gate("gated_activation", kind, limit)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return ACTIVATIONS[kind](gate) * (up + up_offset if up_offset else up)


def gated_activation_fused(
    gate_up: Tensor,
    *,
    kind: str,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Tensor:
    """Return `gated_activation` of the two halves of gate_up's last dimension: (..., 2 * I) -> (..., I).

    gate_first: the gate is the first half, else the second. interleaved: gate and up alternate instead, as in gpt-oss.
    """
    check_floating("gated_activation_fused", gate_up=gate_up)
    check_gate("gated_activation_fused", kind, limit)
    check(
        gate_up.dim() >= 1 and gate_up.shape[-1] % 2 == 0,
        "gated_activation_fused",
        f"the last dimension of gate_up {tuple(gate_up.shape)} must be even",
    )
    first, second = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    gate, up = (first, second) if gate_first else (second, first)
    return gated_activation(gate, up, kind=kind, limit=limit, up_offset=up_offset)


def check_gate(op: str, kind: str, limit: float) -> None:
    """Raise `RuntimeError` unless kind and limit are as `gated_activation` takes them."""
    check_choice(op, "kind", kind, tuple(ACTIVATIONS))
    check(limit >= 0, op, f"limit must be positive, or 0 for none, not {limit}")


_GPT_OSS: Mapping[str, Any] = MappingProxyType({"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0})


def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every kind, the forms of input that eager code has, and clamped gates with values beyond the limit."""
    draw = Draw(dtype, device, seed=4)
    for kind in ACTIVATIONS:
        yield Sample(name=kind, kwargs={"gate": draw(7, 40, scale=2.0), "up": draw(7, 40), "kind": kind})
    yield Sample(name="no tokens", kwargs={"gate": draw(0, 40), "up": draw(0, 40), "kind": "silu"})
    large = {"gate": draw(5, 40, scale=30.0), "up": draw(5, 40, scale=30.0)}
    yield Sample(name="large values", kwargs={**large, "kind": "silu"})
    yield Sample(name="clamped", kwargs={**large, "kind": "silu", "limit": 7.0})
    yield Sample(name="gpt-oss", kwargs={**large, **_GPT_OSS})
    gate, up = draw(2, 3, 80).chunk(2, dim=-1)
    yield Sample(name="halves of one tensor", kwargs={"gate": gate, "up": up, "kind": "silu"})


def fused_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every kind and every layout of gate and up."""
    draw = Draw(dtype, device, seed=5)
    for kind in ACTIVATIONS:
        yield Sample(name=kind, kwargs={"gate_up": draw(7, 80, scale=2.0), "kind": kind})
    yield Sample(name="up first", kwargs={"gate_up": draw(2, 3, 80), "kind": "silu", "gate_first": False})
    yield Sample(name="interleaved", kwargs={"gate_up": draw(5, 80), "kind": "gelu", "interleaved": True})
    yield Sample(name="gpt-oss", kwargs={"gate_up": draw(5, 80, scale=30.0), "interleaved": True, **_GPT_OSS})
    yield Sample(name="no tokens", kwargs={"gate_up": draw(0, 80), "kind": "silu"})
    yield Sample(name="slice of wider rows", kwargs={"gate_up": draw(5, 200)[:, 60:140], "kind": "silu"})


# The fakes are the references: strides follow the gate, and only the same ops on fake tensors give exactly those.
GATED_ACTIVATION = declare(
    CanonicalOp(
        name="gated_activation", schema=SCHEMA, reference=gated_activation, fake=gated_activation, samples=samples
    )
)
GATED_ACTIVATION_FUSED = declare(
    CanonicalOp(
        name="gated_activation_fused",
        schema=FUSED_SCHEMA,
        reference=gated_activation_fused,
        fake=gated_activation_fused,
        samples=fused_samples,
    )
)
