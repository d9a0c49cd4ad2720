"""Quantisation to int8: symmetric by token or by a given scale, and asymmetric by a given scale and zero point.

Shapes: x (..., K); scales (..., 1) by token, () for one. `npu_dynamic_quant_asymmetric` makes no zero point that fits
`core::quantize_asymmetric`: it leaves zero out of a row's range, and gives offsets that are neither rounded nor cut off
at the range of int8, so that zero has no code of its own. Zero points are taken, and not made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_npu.ops.conditions import HALF, all_of, dtypes, int8_codes, rank_at_least

__all__ = ["asymmetric_condition", "condition", "quantize", "quantize_asymmetric"]


def quantize(x: Tensor, scale: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
    """Do what `core::quantize` does, for calls that `condition` lets pass."""
    if scale is not None:
        return _divided(x, scale, None), scale.clone()
    if not x.numel():
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    # For other strides the kernel still returns contiguous codes, but its fake returns the strides of x.
    codes, made = torch.ops.npu.npu_dynamic_quant(x.contiguous())
    # A row of zeros has scale 0 here; in the op it has the smallest normal number. Its codes stand for zero with both.
    return codes, made.unsqueeze(-1).clamp(min=torch.finfo(torch.float32).tiny)


def quantize_asymmetric(x: Tensor, scale: Tensor, zero_point: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `core::quantize_asymmetric` does, for calls that `asymmetric_condition` lets pass."""
    return _divided(x, scale, zero_point.to(torch.int32)), scale.clone(), zero_point.clone()


def _divided(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return round(x / scale + zero_point) (..., K) in int8, contiguous; scale and zero point ()."""
    # CANN's page on the kernel has scales of fp32 with rows of fp32 alone; its checks take them with any rows.
    wide = x.float()
    if not x.numel():
        return x.new_empty(x.shape, dtype=torch.int8)
    zero = None if zero_point is None else zero_point.view(1)
    codes: Tensor = torch.ops.npu.npu_quantize(wide, scale.view(1), zero, torch.qint8, -1, True)
    return codes


def condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::quantize`, or None."""
    granularity, scale = call.args["granularity"], call.args["scale"]
    if scale is None and granularity != "token":
        return f"scales are to be made by {granularity}, and the kernel makes one for each token"
    return (_made if scale is None else _given)(call)


def asymmetric_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::quantize_asymmetric`, or None."""
    if call.args["scale"] is None:
        return "the kernel leaves zero out of a row's range and rounds no zero point: zero would have no code"
    return _given(call)


def _one_scale(call: OpCall) -> str | None:
    granularity, scale = call.args["granularity"], call.args["scale"]
    if granularity != "tensor":
        return f"a scale is given by {granularity}, and the kernel takes one for the whole tensor"
    return None if scale.dtype == torch.float32 else f"scale is {scale.dtype}, and the kernel takes torch.float32"


_made = all_of(int8_codes, dtypes(("x",), HALF), rank_at_least("x", 2))
_given = all_of(int8_codes, dtypes(("x",)), _one_scale)
