"""The gate of a gated MLP over one tensor with both halves, also with quantisation to int8.

Shapes: gate_up (..., 2 * I), gate and up (..., I). The kernels halve the last dimension and compute in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_npu.ops.conditions import HALF, all_of, dtypes, int8_codes, rank_at_least
from core_npu.ops.layout import Rows, rows_of

__all__ = [
    "fused_condition",
    "gate",
    "gated_activation",
    "gated_activation_fused",
    "gated_activation_quantize",
    "halves_condition",
    "quantize_condition",
]

_GELU = {"gelu": 0, "gelu_tanh": 1}
"""Kind -> the number of the form in `npu_geglu`: 0 is the error function's form, 1 the approximation by tanh."""

_ALPHA = {"silu": 1.0, "quick_gelu": 1.702}
"""Kind -> factor inside the sigmoid of the gates that are cut off: x * sigmoid(alpha * x)."""

_ALIGNED = 64
"""What divides the last dimension of x in `npu_dequant_swiglu_quant` on Atlas A2 and A3."""


def gated_activation_fused(gate_up: Tensor, **options: Any) -> Tensor:
    """Do what `core::gated_activation_fused` does, for calls that `fused_condition` lets pass."""
    rows = Rows() if gate_up.is_contiguous() else rows_of(gate_up.chunk(2, dim=-1)[0])
    return rows.give(gate(rows.take(gate_up), **options))


def gate(
    gate_up: Tensor,
    *,
    kind: str,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Tensor:
    """Return the gate (..., I) of gate_up (..., 2 * I) by the kernel for it; contiguous. As `fused_condition` says."""
    # The kernels for gates take only contiguous rows.
    both = gate_up.contiguous()
    if not both.numel():
        return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))
    npu = torch.ops.npu
    out: Tensor
    if kind in _GELU:
        out, _gelu = npu.npu_geglu(both, dim=-1, approximate=_GELU[kind], activate_left=gate_first)
    elif limit:
        out = npu.npu_clipped_swiglu(both, alpha=_ALPHA[kind], limit=limit, bias=up_offset, interleaved=interleaved)
    else:
        out = npu.npu_swiglu(both, -1)
    return out


def fused_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::gated_activation_fused`, or None."""
    return dtypes(("gate_up",))(call) or gate_refusal(**{n: v for n, v in call.args.items() if n != "gate_up"})


def gate_refusal(
    *, kind: str, gate_first: bool = True, interleaved: bool = False, limit: float = 0.0, up_offset: float = 0.0
) -> str | None:
    """Return why no kernel makes this gate of one tensor, or None."""
    if kind in _GELU:
        plain = not (limit or up_offset or interleaved)
        return None if plain else f"kind is {kind!r}, and its kernel knows no limit, offset or alternating halves"
    if kind not in _ALPHA:
        return f"kind is {kind!r}, and the kernels know {', '.join(map(repr, (*_ALPHA, *_GELU)))}"
    if not gate_first:
        return f"the gate is the second half, and the kernel for {kind!r} takes it for the first"
    if kind == "silu" and not (limit or up_offset or interleaved):
        return None
    return None if limit else f"limit is 0, and the kernel for {kind!r} of this form cuts off at a positive one"


def gated_activation(gate: Tensor, up: Tensor, **_: Any) -> Tensor:
    """Do what `core::gated_activation` does, for calls that `halves_condition` lets pass."""
    if not _are_halves(gate, up):
        raise RuntimeError("core::gated_activation: gate and up are no halves of one tensor, as they were when traced")
    both = gate.as_strided((*gate.shape[:-1], 2 * gate.shape[-1]), gate.stride(), gate.storage_offset())
    rows = rows_of(gate)
    whole = rows.take(both).contiguous()
    return rows.give(torch.ops.npu.npu_swiglu(whole, -1) if gate.numel() else gate.new_empty(rows.take(gate).shape))


def halves_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::gated_activation`, or None."""
    args = call.args
    if args["kind"] != "silu" or args["limit"] or args["up_offset"]:
        return "the kernel knows kind 'silu' without limit and offset"
    if not _are_halves(args["gate"], args["up"]):
        return "gate and up are no halves of one tensor, and to join them costs the copy that the kernel would save"
    return dtypes(("gate", "up"))(call)


def _are_halves(gate: Tensor, up: Tensor) -> bool:
    """Tell whether up lies right behind gate in every row of one tensor."""
    same = gate.dtype == up.dtype and gate.stride() == up.stride() and gate.dim() > 0 and gate.stride(-1) == 1
    behind = up.storage_offset() - gate.storage_offset() == gate.shape[-1]
    return same and behind and gate.untyped_storage()._cdata == up.untyped_storage()._cdata


def gated_activation_quantize(
    gate: Tensor,
    up: Tensor | None,
    scale: Tensor | None,
    *,
    kind: str,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float = 0.0,
    up_offset: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Do what `core::gated_activation_quantize` does, for calls that `quantize_condition` lets pass."""
    both = gate.contiguous()
    if not both.numel():
        shape = (*both.shape[:-1], both.shape[-1] // 2)
        return both.new_empty(shape, dtype=torch.int8), both.new_empty((*shape[:-1], 1), dtype=torch.float32)
    mode = (1 if interleaved else 2) if limit else 0
    clipped = {"clamp_limit": limit, "glu_alpha": _ALPHA[kind], "glu_bias": up_offset} if limit else {}
    codes, made = torch.ops.npu.npu_dequant_swiglu_quant(
        both, activate_left=gate_first, quant_mode=1, swiglu_mode=mode, **clipped
    )
    return codes, made.unsqueeze(-1).clamp(min=torch.finfo(torch.float32).tiny)


def quantize_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::gated_activation_quantize`, or None."""
    args = call.args
    if args["up"] is not None:
        return "gate and up are two tensors, and the kernel halves one"
    if args["scale"] is not None or args["granularity"] != "token":
        return "the kernel makes one scale for each token"
    if args["kind"] not in _ALPHA:
        return f"kind is {args['kind']!r}, and the kernel knows {', '.join(map(repr, _ALPHA))}"
    if args["gate"].shape[-1] % _ALIGNED:
        return f"both halves are {args['gate'].shape[-1]} wide, and the kernel takes multiples of {_ALIGNED}"
    either_order = args["kind"] == "silu" and not (args["limit"] or args["up_offset"] or args["interleaved"])
    return _rows_condition(call) or (None if either_order else gate_refusal(**{name: args[name] for name in _GATE}))


_GATE = ("kind", "gate_first", "interleaved", "limit", "up_offset")
_rows_condition = all_of(int8_codes, dtypes(("gate",), HALF), rank_at_least("gate", 2))
