"""`core::quantized_grouped_linear` in one launch: any format of weight codes, by x of codes or of 16-bit values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR
from core_cuda.ops import launching
from core_cuda.ops.conditions import all_of, dtypes
from core_cuda.ops.moe.quantized_configs import LEAST_K, QuantizedConfig, QuantizedShape, default_config
from core_cuda.ops.moe.quantized_kernel import quantized_product_kernel
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

MAX_EXPERTS = 1023
_HALVES = (torch.bfloat16, torch.float16)


@kernel_of(QUANTIZED_GROUPED_LINEAR)
def quantized_grouped_linear(
    x: Tensor,
    x_scale: Tensor | None,
    ends: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    **options: Any,
) -> Tensor:
    """Compute the product as the configuration for these sizes says."""
    return run_quantized_grouped(x, x_scale, ends, w_codes, w_scale, w_zero_point, **options)


def run_quantized_grouped(
    x: Tensor,
    x_scale: Tensor | None,
    ends: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    *,
    out_dtype: torch.dtype,
    num_bits: int = 8,
    x_zero_point: Tensor | None = None,
    config: QuantizedConfig | None = None,
) -> Tensor:
    """Return (R, N) in out_dtype, arguments as of the op; config defaults to `default_config`.

    Accumulates in fp32, codes of int8 by such codes exactly, and rounds once. The same call gives the same bits.
    """
    num_experts, columns, _ = w_codes.shape
    out = x.new_empty((x.shape[0], columns), dtype=out_dtype)
    if not out.numel():
        return out
    shape = shape_of(x, w_codes, w_scale, num_bits)
    config = config or _measured(shape) or default_config(shape)
    assert shape.fits(config.block_k), config
    x = x if x.stride(1) == 1 else x.contiguous()
    w_scale = w_scale.contiguous()
    # Any pointer where there is nothing: it is not read.
    x_scales, x_zeros, w_zeros = (
        w_scale if t is None else t.contiguous() for t in (x_scale, x_zero_point, w_zero_point)
    )
    # Every expert with rows, and the rows of none, may leave one tile unfilled.
    num_tiles = (shape.rows + min(num_experts + 1, shape.rows) * (config.block_m - 1)) // config.block_m
    launching.launch(
        quantized_product_kernel, (num_tiles * triton.cdiv(columns, config.block_n),),
        x, x_scales, x_zeros, ends.contiguous(), w_codes, w_scale, w_zeros, out, shape.rows, columns, shape.depth,
        num_experts, w_scale.shape[2], x.stride(0), w_codes.stride(0), w_codes.stride(1), int(x_scales.numel() > 1),
        EXPERTS=max(32, triton.next_power_of_2(num_experts + 1)), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, PACKED=num_bits == 4, SWAP=config.swap, EVEN_K=shape.depth % config.block_k == 0,
        GROUPS=shape.groups(config.block_k), X_SCALED=x_scale is not None, X_ZERO=x_zero_point is not None,
        W_ZERO=w_zero_point is not None, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def shape_of(x: Tensor, w_codes: Tensor, w_scale: Tensor, num_bits: int) -> QuantizedShape:
    """Return the sizes by which a configuration is chosen."""
    rows, depth = x.shape
    return QuantizedShape(
        rows=rows,
        experts=w_codes.shape[0],
        columns=w_codes.shape[1],
        depth=depth,
        group=depth // w_scale.shape[2],
        w_bits=num_bits,
        x_bits=8 * x.itemsize,
    )


def _measured(shape: QuantizedShape) -> QuantizedConfig | None:
    """Return the fastest configuration measured for this shape on this GPU, or None."""
    _, won = winner("quantized_grouped_linear", asdict(shape), ranged=("rows",))
    return QuantizedConfig(**won) if won else None


def _formats(call: OpCall) -> str | None:
    """Refuse values and results that 16-bit products are not exact enough for."""
    x, out_dtype = call.args["x"], call.args["out_dtype"]
    given = " and ".join(map(str, _HALVES))
    if call.args["x_scale"] is None and x.dtype not in _HALVES:
        return f"x is {x.dtype}, and the kernel multiplies codes by values of {given}"
    if out_dtype not in _HALVES:
        return f"out_dtype is {out_dtype}, and products are summed exactly enough for {given} only"
    return None


def _layout(call: OpCall) -> str | None:
    """Refuse groups that no step of the matrix units fits, scattered codes, and more experts than a program counts."""
    codes, groups = call.args["w_codes"], call.args["w_scale"].shape[2]
    group, least = call.args["x"].shape[1] // groups, LEAST_K * (2 if call.args["x_scale"] is not None else 1)
    if groups > 1 and group % least:
        return f"groups are of {group} inputs, and the kernel takes multiples of {least} for these codes"
    if codes.stride(2) != 1:
        return "rows of w_codes are not one run of memory each"
    if codes.shape[0] > MAX_EXPERTS:
        return f"{codes.shape[0]} experts, and the kernel takes up to {MAX_EXPERTS}"
    return None


why_not = all_of(dtypes, _formats, _layout)
"""Why the kernel cannot take a call, or None: dtypes, the GPU's codes, groups, strides, too many experts."""
