"""RMSNorm: alone, of the sum of two tensors, and of such a sum with int8 codes as its result.

Shapes: x (..., D), weight (D,). The kernels compute in fp32. They round once at the end, or also before they multiply
by the weight: CANN does not say which. Either way they are as accurate as the references.

`core::rms_norm_quantize` is not here: its norm and `core::quantize` run one after the other. `npu_rms_norm_quant` can't
make a scale, and multiplies by a scale in the half precision of the rows, which moves codes by up to a quarter step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_npu.ops.conditions import (
    HALF,
    all_of,
    computes_in_fp32,
    dtypes,
    int8_codes,
    keeps_dtype,
    rank_at_least,
    same_dtype,
)
from core_npu.ops.layout import rows_of

__all__ = [
    "add_rms_norm",
    "add_rms_norm_condition",
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_condition",
    "rms_norm",
    "rms_norm_condition",
]

_FIRST_ONLY = [True, False]
"""Mask that asks `npu_add_rms_norm_dynamic_quant` only for the first of its two quantised results.

Without this mask the smoothing factors that are given decide which results the kernel makes."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, **_: Any) -> Tensor:
    """Do what `core::rms_norm` does, for calls that `rms_norm_condition` lets pass."""
    rows = rows_of(x)
    if not x.numel():
        return rows.give(x.new_empty(rows.take(x).shape))
    if weight is None:
        kernel, weight = torch.ops.npu.npu_rms_norm, x.new_ones(x.shape[-1])
    else:
        kernel = torch.ops.npu.npu_gemma_rms_norm if offset else torch.ops.npu.npu_rms_norm
    return rows.give(kernel(rows.take(x), weight, eps)[0])


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **_: Any) -> tuple[Tensor, Tensor]:
    """Do what `core::add_rms_norm` does, for calls that `add_rms_norm_condition` lets pass."""
    rows = rows_of(x, residual)
    first, second = rows.take(x), rows.take(residual)
    if not x.numel():
        return rows.give(x.new_empty(first.shape)), rows.give(x.new_empty(first.shape))
    gamma = x.new_ones(x.shape[-1]) if weight is None else weight
    normed, _rstd, total = torch.ops.npu.npu_add_rms_norm(first, second, gamma, eps)
    return rows.give(normed), rows.give(total)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `core::add_rms_norm_quantize` does, for calls that `add_rms_norm_quantize_condition` lets pass."""
    rows = rows_of(x, residual)
    if not x.numel():
        used = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if scale is None else scale.clone()
        return x.new_empty(x.shape, dtype=torch.int8), used, rows.give(x.new_empty(rows.take(x).shape))
    gamma = x.new_ones(x.shape[-1]) if weight is None else weight
    # Codes are contiguous in the order of the dimensions, so the kernels get the operands in that order too. Only the
    # sum is laid out anew.
    if scale is None:
        codes, _unused, total, made, _unmade = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
            x, residual, gamma, epsilon=eps, output_mask=_FIRST_ONLY
        )
        used = made.unsqueeze(-1).clamp(min=torch.finfo(torch.float32).tiny)
    else:
        factors = scale.expand(x.shape[-1]).contiguous()
        codes, _unused, total = torch.ops.npu.npu_add_rms_norm_quant(
            x, residual, gamma, factors, None, epsilon=eps, div_mode=True
        )
        used = scale.clone()
    return codes, used, rows.give(rows.take(total).contiguous())


def rms_norm_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::rms_norm`, or None."""
    if call.args["offset"] not in (0.0, 1.0):
        return f"offset is {call.args['offset']}, and the kernels add 0 or 1 to the weight"
    return _norm_condition(call) or same_dtype("x", "weight", wide=not call.args["offset"])(call)


def add_rms_norm_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::add_rms_norm`, or None."""
    if call.args["offset"] and call.args["weight"] is not None:
        return f"offset is {call.args['offset']}, and the kernel that adds takes the weight as it is"
    return _norm_condition(call) or _sum_condition(call)


def add_rms_norm_quantize_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::add_rms_norm_quantize`, or None."""
    return _codes_condition(call) or add_rms_norm_condition(call)


_norm_condition = all_of(dtypes(("x",)), computes_in_fp32("x"), keeps_dtype("x"))
_sum_condition = same_dtype("x", "residual", "weight")


def _codes_condition(call: OpCall) -> str | None:
    granularity, scale = call.args["granularity"], call.args["scale"]
    if scale is None and granularity != "token":
        return f"scales are to be made by {granularity}, and the kernel makes one for each token"
    if scale is not None and granularity != "tensor":
        return f"a scale is given by {granularity}, and the kernel takes one for the whole tensor"
    if scale is not None and (scale.dtype, call.args["x"].dtype) != (torch.float32, torch.float16):
        return (
            f"the scale given is {scale.dtype} and x {call.args['x'].dtype}, and the kernel takes a scale of "
            "torch.float32 with torch.float16 alone: it would round the scale of other rows to half precision"
        )
    return _int8_rows(call)


_int8_rows = all_of(int8_codes, dtypes(("x",), HALF), rank_at_least("x", 2))
