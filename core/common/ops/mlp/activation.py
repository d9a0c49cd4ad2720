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
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check, check_choice, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare


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


def gated_activation(gate: Tensor, up: Tensor, *, kind: str, limit: float = 0.0, up_offset: float = 0.0) -> Tensor:
    """Return `act(gate) * (up + up_offset)`, of the shape of both and their common dtype.

    limit, unless 0: gate is cut off above it and up at both sides of zero, before anything else.
    """
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
    first, second = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    gate, up = (first, second) if gate_first else (second, first)
    return gated_activation(gate, up, kind=kind, limit=limit, up_offset=up_offset)


def check_gate(op: str, kind: str, limit: float) -> None:
    """Raise `RuntimeError` unless kind and limit are as `gated_activation` takes them."""
    check_choice(op, "kind", kind, tuple(ACTIVATIONS))
    check(limit >= 0, op, f"limit must be positive, or 0 for none, not {limit}")


def _check(gate: Tensor, up: Tensor, *, kind: str, limit: float = 0.0, **_: Any) -> None:
    check_floating("gated_activation", gate=gate, up=up)
    check_shape("gated_activation", tuple(gate.shape), up=up)
    check_gate("gated_activation", kind, limit)


def _check_fused(gate_up: Tensor, *, kind: str, limit: float = 0.0, **_: Any) -> None:
    op, shape = "gated_activation_fused", tuple(gate_up.shape)
    check_floating(op, gate_up=gate_up)
    check_gate(op, kind, limit)
    check(len(shape) >= 1 and shape[-1] % 2 == 0, op, f"the last dimension of gate_up {shape} must be even")


GPT_OSS: Mapping[str, Any] = MappingProxyType({"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0})
"""The gate of gpt-oss, for tests."""


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every kind, the forms of input that eager code has, and clamped gates with values beyond the limit."""
    calls = {kind: {"gate": draw(7, 40, scale=2.0), "up": draw(7, 40), "kind": kind} for kind in ACTIVATIONS}
    none = {"gate": draw(0, 40), "up": draw(0, 40), "kind": "silu"}
    large = {"gate": draw(5, 40, scale=30.0), "up": draw(5, 40, scale=30.0), "kind": "silu"}
    gate, up = draw(2, 3, 80).chunk(2, dim=-1)
    return calls | {
        "no tokens": none,
        "large values": large,
        "clamped": {**large, "limit": 7.0},
        "gpt-oss": {**large, **GPT_OSS},
        "halves of one tensor": {"gate": gate, "up": up, "kind": "silu"},
    }


def _fused_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every kind and every layout of gate and up."""
    return {kind: {"gate_up": draw(7, 80, scale=2.0), "kind": kind} for kind in ACTIVATIONS} | {
        "up first": {"gate_up": draw(2, 3, 80), "kind": "silu", "gate_first": False},
        "interleaved": {"gate_up": draw(5, 80), "kind": "gelu", "interleaved": True},
        "gpt-oss": {"gate_up": draw(5, 80, scale=30.0), "interleaved": True, **GPT_OSS},
        "no tokens": {"gate_up": draw(0, 80), "kind": "silu"},
        "slice of wider rows": {"gate_up": draw(5, 200)[:, 60:140], "kind": "silu"},
    }


# The fakes are the references: strides follow the gate, and only the same ops on fake tensors give exactly those.
GATED_ACTIVATION = declare(
    CanonicalOp(
        schema="gated_activation(Tensor gate, Tensor up, *, str kind, float limit=0.0, float up_offset=0.0) -> Tensor",
        reference=gated_activation,
        fake=gated_activation,
        check=_check,
        calls=_calls,
        seed=4,
    )
)
GATED_ACTIVATION_FUSED = declare(
    CanonicalOp(
        schema="gated_activation_fused(Tensor gate_up, *, str kind, bool gate_first=True, bool interleaved=False, "
        "float limit=0.0, float up_offset=0.0) -> Tensor",
        reference=gated_activation_fused,
        fake=gated_activation_fused,
        check=_check_fused,
        calls=_fused_calls,
        seed=5,
    )
)
