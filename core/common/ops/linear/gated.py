"""`core::linear` and `core::gated_linear`: a linear layer, alone and with the gate of a gated MLP behind it.

Shapes: x (..., K) with any leading dimensions; weight (N, K), as `torch.nn.Linear` holds it; bias (N,). Results are
contiguous. A gated linear's weight holds gate and up, N = 2 * I: first one and then the other, or row by row in turn.
Source of the gated form: Shazeer, arXiv 2002.05202.

x, weight and bias have one dtype, and products are summed in at least fp32. The linear's result is rounded to x's
dtype, in `gated_linear` before the gate; a kernel may keep it wider there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.mlp.activation import ACTIVATIONS, GPT_OSS, check_gate, gated_activation_fused


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: (..., K) -> (..., N), as `torch.nn.functional.linear`."""
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, **gate: Any) -> Tensor:
    """Return `gated_activation_fused` of `linear`: (..., K) -> (..., I).

    weight (2 * I, K), bias (2 * I,) or None. The arguments by name are those of `core::gated_activation_fused`.
    """
    return gated_activation_fused(functional.linear(x, weight, bias), **gate)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _gated_fake(x: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, op: str = "linear") -> None:
    check_floating(op, x=x, weight=weight, bias=bias)
    fits = x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    check(fits, op, f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not (..., K) and (N, K)")
    check(x.dtype == weight.dtype, op, f"x is {x.dtype}, weight {weight.dtype}")
    check_shape(op, (weight.shape[0],), bias=bias)
    check(bias is None or bias.dtype == x.dtype, op, f"x is {x.dtype}, bias {bias if bias is None else bias.dtype}")


def _check_gated(x: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, limit: float = 0.0, **_: Any) -> None:
    _check(x, weight, bias, op="gated_linear")
    check_gate("gated_linear", kind, limit)
    rows = weight.shape[0]
    check(rows % 2 == 0, "gated_linear", f"weight must have as many rows for the gate as for up, not {rows} in all")


def _rows(draw: Draw) -> dict[str, Tensor]:
    """Return forms of x worth testing, all with rows of 48."""
    return {
        "odd rows": draw(7, 48),
        "one row": draw(1, 48),
        "no tokens": draw(0, 48),
        "rank 1": draw(48),
        "rank 3": draw(1, 5, 48),
        "rank 4": draw(2, 3, 5, 48),
        "slice of wider rows": draw(5, 144)[:, 48:96],
        "transposed": draw(5, 2, 48).transpose(0, 1),
        "large values": draw(5, 48, scale=3e2),
    }


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every form of x, with and without a bias, weights that are parts of others, and such as `x @ w` reads."""
    weight, bias = draw(40, 48, scale=0.2), draw(40)
    calls: dict[str, dict[str, Any]] = {}
    for name, x in _rows(draw).items():
        calls[name] = {"x": x, "weight": weight, "bias": None}
        calls[f"{name}, bias"] = {"x": x, "weight": weight, "bias": bias}
    wider = draw(120, 48, scale=0.2)
    return calls | {
        "rows of a taller weight": {"x": draw(3, 48), "weight": wider[40:80], "bias": None},
        "odd sizes": {"x": draw(3, 33), "weight": draw(27, 33, scale=0.2), "bias": draw(27)},
        "turned weight": {"x": draw(3, 48), "weight": draw(48, 40, scale=0.2).T, "bias": None},
        "turned weight, rank 4, bias": {"x": draw(2, 3, 5, 48), "weight": draw(48, 40, scale=0.2).T, "bias": bias},
        "part of a turned weight": {"x": draw(1, 48), "weight": draw(48, 120, scale=0.2)[:, 40:80].T, "bias": bias},
        "odd sizes, turned weight": {"x": draw(9, 33), "weight": draw(33, 27, scale=0.2).T, "bias": draw(27)},
    }


def _gated_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every kind, every layout of gate and up, every form of x."""
    weight, bias = draw(64, 48, scale=0.2), draw(64)
    calls: dict[str, dict[str, Any]] = {kind: {"x": draw(7, 48), "bias": None, "kind": kind} for kind in ACTIVATIONS}
    calls |= {name: {"x": x, "kind": "silu"} for name, x in _rows(draw).items()}
    calls |= {
        "up first": {"x": draw(2, 3, 48), "kind": "silu", "gate_first": False},
        "interleaved": {"x": draw(5, 48), "kind": "gelu", "interleaved": True},
        "gpt-oss": {"x": draw(5, 48, scale=30.0), "interleaved": True, **GPT_OSS},
    }
    return {name: {"weight": weight, "bias": bias, **call} for name, call in calls.items()}


LINEAR = declare(
    CanonicalOp(
        schema="linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
        reference=linear,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=23,
    )
)
GATED_LINEAR = declare(
    CanonicalOp(
        schema="gated_linear(Tensor x, Tensor weight, Tensor? bias, *, str kind, bool gate_first=True, "
        "bool interleaved=False, float limit=0.0, float up_offset=0.0) -> Tensor",
        reference=gated_linear,
        fake=_gated_fake,
        check=_check_gated,
        calls=_gated_calls,
        seed=24,
    )
)
