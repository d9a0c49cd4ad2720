"""Gated activations of one tensor of both halves: aclnnSwiGlu and its kin, each function written out in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from simulator.bounds import CODE_MAX, HALF, INT8, demand
from simulator.marshal import kernel


def _halves(x: Tensor, dim: int, alternating: bool = False) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of a dimension in fp32, or its even and its odd places."""
    demand(x.is_contiguous(), "x is not contiguous")
    demand(x.shape[dim] % 2 == 0, f"a dimension of {x.shape[dim]} has no halves")
    size = x.shape[dim]
    places = torch.arange(size)
    first, second = (places[::2], places[1::2]) if alternating else (places[: size // 2], places[size // 2 :])
    wide = x.to(torch.float32)
    return wide.index_select(dim, first), wide.index_select(dim, second)


def _swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x / (1.0 + torch.exp(-alpha * x))


@kernel("aclnnSwiGlu", "TIT")
def swiglu(x: Tensor, dim: int, out: Tensor) -> None:
    left, right = _halves(x, dim)
    out.copy_(_swish(left) * right)


@kernel("aclnnGeGluV3", "TIIbTT")
def geglu(x: Tensor, dim: int, approximate: int, activate_left: bool, out: Tensor, gelu: Tensor) -> None:
    left, right = _halves(x, dim)
    gated, linear = (left, right) if activate_left else (right, left)
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (gated + 0.044715 * gated**3)
        activated = gated / (1.0 + torch.exp(-2.0 * inner))  # (1 + tanh(z)) / 2 is the logistic function of 2 z
    else:
        activated = gated * torch.special.ndtr(gated)
    gelu.copy_(activated)
    out.copy_(activated * linear)


@kernel("aclnnClippedSwiglu", "TTIDDDbT")
def clipped_swiglu(
    x: Tensor,
    group_index: Tensor | None,
    dim: int,
    alpha: float,
    limit: float,
    bias: float,
    interleaved: bool,
    out: Tensor,
) -> None:
    demand(group_index is None, "groups are not simulated")
    left, right = _halves(x, dim, interleaved)
    out.copy_(_swish(left.clamp(max=limit), alpha) * (right.clamp(-limit, limit) + bias))


@kernel("aclnnDequantSwigluQuantV2", "TTTTTTTbCICIIDDDTT")
def dequant_swiglu_quant(
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    group_index: Tensor | None,
    activate_left: bool,
    quant_mode: str,
    dst_type: int,
    round_mode: str,
    activate_dim: int,
    swiglu_mode: int,
    clamp_limit: float,
    alpha: float,
    glu_bias: float,
    y: Tensor,
    scale: Tensor,
) -> None:
    """Codes of a gate of rows in half precision, one scale a row. Only the dynamic form without groups."""
    demand(x.dtype in HALF and x.dim() >= 2, f"x {x.dtype} of rank {x.dim()}")
    demand(x.shape[-1] % 64 == 0, f"a last dimension of {x.shape[-1]}: 64 divides it")
    options = (weight_scale, activation_scale, bias, quant_offset, group_index)
    demand(quant_scale is None or quant_scale.shape == (1, x.shape[-1] // 2), "one row of smoothing factors")
    demand(quant_mode == "dynamic" and all(each is None for each in options), "not simulated")
    demand((dst_type, round_mode, activate_dim % x.dim()) == (INT8, "rint", x.dim() - 1), "not simulated")
    left, right = _halves(x, -1, alternating=swiglu_mode == 1)
    if swiglu_mode == 0:
        product = _swish(left) * right if activate_left else left * _swish(right)
    else:
        demand(activate_left, "the gate is the first half in this mode")
        product = _swish(left.clamp(max=clamp_limit), alpha) * (right.clamp(-clamp_limit, clamp_limit) + glu_bias)
    product = product if quant_scale is None else product * quant_scale.to(torch.float32)
    made = product.abs().amax(dim=-1) / CODE_MAX
    scale.copy_(made)
    y.copy_((product / made.unsqueeze(-1)).nan_to_num(0.0).round())
