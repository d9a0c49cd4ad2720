"""`core::linear` and `core::gated_linear`: a linear layer, alone and with the gate of a gated MLP behind it.

Shapes: x (..., K) with any leading dimensions; weight (N, K), as `torch.nn.Linear` holds it; bias (N,). Results are
contiguous. A gated linear's weight holds gate and up, N = 2 * I: first one and then the other, or row by row in turn.
Source of the gated form: Shazeer, arXiv 2002.05202.

x, weight and bias have one dtype, and products are summed in at least fp32. The linear's result is rounded to x's
dtype, in `gated_linear` before the gate; a kernel may keep it wider there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check, check_floating
from core.common.ops.declaration import CanonicalOp, Sample, declare
from core.common.ops.mlp.activation import ACTIVATIONS, check_gate, gated_activation_fused

SCHEMA = "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"
GATED_SCHEMA = (
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, *, str kind, bool gate_first=True, bool interleaved=False, "
    "float limit=0.0, float up_offset=0.0) -> Tensor"
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: (..., K) -> (..., N), as `torch.nn.functional.linear`."""
    _check("linear", x, weight, bias)
    return functional.linear(x, weight, bias)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    kind: str,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Tensor:
    """Return `gated_activation_fused` of `linear`: (..., K) -> (..., I).

    weight (2 * I, K), bias (2 * I,) or None. The arguments by name are those of `core::gated_activation_fused`.
    """
    _check_gated(x, weight, bias, kind, limit)
    whole = functional.linear(x, weight, bias)
    return gated_activation_fused(
        whole, kind=kind, gate_first=gate_first, interleaved=interleaved, limit=limit, up_offset=up_offset
    )


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check("linear", x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_gated(x: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, limit: float = 0.0, **_: Any) -> Tensor:
    _check_gated(x, weight, bias, kind, limit)
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise `RuntimeError` unless dtypes and sizes go together."""
    check_floating(op, x=x, weight=weight, bias=bias)
    fits = x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    check(fits, op, f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not (..., K) and (N, K)")
    check(x.dtype == weight.dtype, op, f"x is {x.dtype}, weight {weight.dtype}")
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        check(fits, op, f"bias must have shape ({weight.shape[0]},), not {tuple(bias.shape)}")
        check(bias.dtype == x.dtype, op, f"x is {x.dtype}, bias {bias.dtype}")


def _check_gated(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, limit: float) -> None:
    _check("gated_linear", x, weight, bias)
    check_gate("gated_linear", kind, limit)
    rows = weight.shape[0]
    check(rows % 2 == 0, "gated_linear", f"weight must have as many rows for the gate as for up, not {rows} in all")


def _inputs(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    """Yield forms of x worth testing, all with rows of 48."""
    yield "odd rows", draw(7, 48)
    yield "one row", draw(1, 48)
    yield "no tokens", draw(0, 48)
    yield "rank 1", draw(48)
    yield "rank 3", draw(1, 5, 48)
    yield "rank 4", draw(2, 3, 5, 48)
    yield "slice of wider rows", draw(5, 144)[:, 48:96]
    yield "transposed", draw(5, 2, 48).transpose(0, 1)
    yield "large values", draw(5, 48, scale=3e2)


def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every form of x, with and without a bias, and weights that are parts of others."""
    draw = Draw(dtype, device, seed=23)
    weight, bias = draw(40, 48, scale=0.2), draw(40)
    for name, x in _inputs(draw):
        yield Sample(name=name, kwargs={"x": x, "weight": weight, "bias": None})
        yield Sample(name=f"{name}, bias", kwargs={"x": x, "weight": weight, "bias": bias})
    wider = draw(120, 48, scale=0.2)
    yield Sample(name="rows of a taller weight", kwargs={"x": draw(3, 48), "weight": wider[40:80], "bias": None})
    odd = {"x": draw(3, 33), "weight": draw(27, 33, scale=0.2), "bias": draw(27)}
    yield Sample(name="odd sizes", kwargs=odd)


def gated_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every kind, every layout of gate and up, every form of x."""
    draw = Draw(dtype, device, seed=24)
    weight, bias = draw(64, 48, scale=0.2), draw(64)
    for kind in ACTIVATIONS:
        yield Sample(name=kind, kwargs={"x": draw(7, 48), "weight": weight, "bias": None, "kind": kind})
    for name, x in _inputs(draw):
        yield Sample(name=name, kwargs={"x": x, "weight": weight, "bias": bias, "kind": "silu"})
    both = {"weight": weight, "bias": bias}
    yield Sample(name="up first", kwargs={"x": draw(2, 3, 48), **both, "kind": "silu", "gate_first": False})
    yield Sample(name="interleaved", kwargs={"x": draw(5, 48), **both, "kind": "gelu", "interleaved": True})
    clamped = {"kind": "quick_gelu", "interleaved": True, "limit": 7.0, "up_offset": 1.0}
    yield Sample(name="gpt-oss", kwargs={"x": draw(5, 48, scale=30.0), **both, **clamped})


LINEAR = declare(CanonicalOp(name="linear", schema=SCHEMA, reference=linear, fake=_fake_linear, samples=samples))
GATED_LINEAR = declare(
    CanonicalOp(
        name="gated_linear", schema=GATED_SCHEMA, reference=gated_linear, fake=_fake_gated, samples=gated_samples
    )
)
