"""Linear layers on codes: int8 by int8, and a floating-point input by a weight of int8.

Shapes: x (..., K), w_codes (N, K), bias (N,), results (..., N). The kernels multiply x (M, K) by a weight (K, N), for
which a transposed view of (N, K) is what CANN recommends, and round once.

Packed codes of 4 bits are not taken: the op stores them off zero and along K, the kernel in two's complement. To turn
a weight over at each call would cost more than it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_npu.ops.conditions import HALF, all_of, dtypes, listed, same_dtype

__all__ = ["quantized_condition", "quantized_linear", "weight_only_condition", "weight_only_linear"]

MAX_SIZE = 65535
"""The most inputs and outputs of both kernels."""

_GROUP_STEP = 32
"""What divides the number of neighbours that share a scale in `npu_weight_quant_batchmatmul`."""


def quantized_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    """Do what `core::quantized_linear` does, for calls that `quantized_condition` lets pass."""
    shape = (*x_codes.shape[:-1], w_codes.shape[0])
    rows = x_codes.reshape(-1, x_codes.shape[-1])
    if not rows.numel():
        return x_codes.new_empty(shape, dtype=out_dtype)
    # One scale is given to each row: without scales by token the kernel takes no bias for results of float16.
    by_token = (x_scale.reshape(-1) if x_scale.numel() > 1 else x_scale.reshape(1).expand(rows.shape[0])).contiguous()
    added = None if bias is None else bias if bias.dtype == torch.bfloat16 else bias.float()
    out: Tensor = torch.ops.npu.npu_quant_matmul(
        rows,
        w_codes.t(),
        w_scale.reshape(-1),
        pertoken_scale=by_token,
        bias=added,
        output_dtype=out_dtype,
    )
    return out.view(shape)


def quantized_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::quantized_linear`, or None."""
    args = call.args
    if args["out_dtype"] not in HALF:
        return f"out_dtype is {args['out_dtype']}, and the kernel gives {listed(HALF)}"
    if args["x_zero_point"] is not None or args["w_zero_point"] is not None:
        return "codes have zero points, and the kernel takes symmetric ones"
    x, x_scale, w, w_scale = (args[name] for name in ("x_codes", "x_scale", "w_codes", "w_scale"))
    if x_scale.dim() and x_scale.shape[-1] != 1:
        return "x has a scale for each group, and the kernel takes one for each token"
    if x_scale.dim() > 1 and any(a != b for a, b in zip(x_scale.shape[:-1], x.shape[:-1], strict=True)):
        return "several tokens of x share a scale, and the kernel takes one for each token"
    if w_scale.dim() and (w_scale.shape[1] != 1 or w_scale.shape[0] not in (1, w.shape[0])):
        return "w has a scale for each group or block, and the kernel takes one for each channel"
    if max(w.shape) > MAX_SIZE:
        return f"w is {tuple(w.shape)}, and the kernel takes sizes up to {MAX_SIZE}"
    return _codes_condition(call)


_codes_condition = all_of(
    dtypes(("x_codes", "w_codes"), (torch.int8,)),
    dtypes(("x_scale", "w_scale"), (torch.float32,)),
    dtypes(("bias",), (torch.float32, *HALF)),
)


def weight_only_linear(
    x: Tensor, w_codes: Tensor, w_scale: Tensor, w_zero_point: Tensor | None, bias: Tensor | None, **_: Any
) -> Tensor:
    """Do what `core::weight_only_linear` does, for calls that `weight_only_condition` lets pass."""
    shape, width = (*x.shape[:-1], w_codes.shape[0]), x.shape[-1]
    rows = x.reshape(-1, width)
    if not rows.numel():
        return x.new_empty(shape)
    groups = w_scale.shape[1]
    # value = (code + offset) * scale in x's dtype. The integers of a zero point are exact in it; a scale of fp32 is
    # rounded once, which moves results by no more than their own rounding does.
    offset = None if w_zero_point is None else -w_zero_point.to(x.dtype)
    given = bias if bias is None or x.dtype == torch.float16 else bias.float()
    out: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
        rows,
        w_codes.t(),
        _factors(w_scale.to(x.dtype)),
        None if offset is None else _factors(offset),
        bias=given,
        antiquant_group_size=0 if groups == 1 else width // groups,
    )
    return out.view(shape)


def _factors(by_group: Tensor) -> Tensor:
    """Return factors (N, G) as the kernel wants them: (G, N), laid out as the transposed weight is; (N,) for G = 1."""
    return by_group.reshape(-1) if by_group.shape[1] == 1 else by_group.t()


def weight_only_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::weight_only_linear`, or None."""
    args = call.args
    x, w, w_scale = args["x"], args["w_codes"], args["w_scale"]
    if args["num_bits"] != 8:
        return "codes of 4 bits are stored off zero, and the kernel reads two's complement"
    neighbours = x.shape[-1] // w_scale.shape[1]
    if w_scale.shape[1] > 1 and neighbours % _GROUP_STEP:
        return f"a scale goes with {neighbours} neighbours, and the kernel takes multiples of {_GROUP_STEP}"
    if (x.dtype, w_scale.dtype) == (torch.float16, torch.float32):
        return "x is torch.float16 and w_scale torch.float32, whose small numbers torch.float16 does not have"
    if max(w.shape) > MAX_SIZE:
        return f"w is {tuple(w.shape)}, and the kernel takes sizes up to {MAX_SIZE}"
    return _weight_condition(call)


_weight_condition = all_of(
    dtypes(("x",), HALF),
    dtypes(("w_codes",), (torch.int8,)),
    dtypes(("w_scale",), (torch.float32, *HALF)),
    same_dtype("x", "bias"),
)
