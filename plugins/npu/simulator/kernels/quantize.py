"""Codes of int8 and products of them: aclnnDynamicQuantV2, aclnnQuantize, aclnnQuantMatmulV5 and their kin."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import CODE_MAX, HALF, INT8, demand
from simulator.marshal import kernel


@kernel("aclnnDynamicQuantV2", "TTTiTTT")
def dynamic_quant(
    x: Tensor,
    smooth: Tensor | None,
    group_index: Tensor | None,
    dst_type: int,
    y: Tensor,
    scale: Tensor,
    offset: Tensor | None,
) -> None:
    """One scale a row, and an offset too where there is a place for it; codes of int8."""
    demand(x.dtype in HALF and x.dim() >= 2 and dst_type == INT8, f"x {x.dtype} of rank {x.dim()}, type {dst_type}")
    demand(group_index is None, "not simulated")
    demand(smooth is None or (smooth.dtype == x.dtype and smooth.shape == x.shape[-1:]), "smoothing factors of a row")
    rows = x.to(torch.float32) * (1 if smooth is None else smooth.to(torch.float32))
    if offset is None:
        largest = rows.abs().amax(dim=-1)
        scale.copy_(largest / CODE_MAX)
        y.copy_((rows * (CODE_MAX / largest).unsqueeze(-1)).nan_to_num(0.0).round())
        return
    most, least = rows.amax(dim=-1), rows.amin(dim=-1)
    scale.copy_((most - least) / (2 * CODE_MAX + 1))
    offset.copy_(CODE_MAX - most / scale)
    y.copy_((rows / scale.unsqueeze(-1) + offset.unsqueeze(-1)).nan_to_num(0.0).round().clamp(-CODE_MAX - 1, CODE_MAX))


@kernel("aclnnQuantize", "TTTiIT")
def quantize(x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, out: Tensor) -> None:
    """Divide by one scale, or by one for each place of an axis, and add zero points.

    Scales of fp32 go with x of any dtype, as torch_npu documents it and the published checks of aclnnQuantize have it;
    CANN's page on it asks for those of x.
    """
    floating = (torch.float32, *HALF)
    demand(x.dtype in floating and scales.dtype in floating, f"x {x.dtype} with scales {scales.dtype}")
    given = {scales.dtype} if zero_points is None else {scales.dtype, zero_points.dtype}
    uniform = torch.bfloat16 not in given or given == {x.dtype}
    demand(uniform, f"scales or zero points of bfloat16 where not all is: {x.dtype}, {given}")
    whole = (torch.int8, torch.uint8, torch.int32, torch.bfloat16)
    demand(zero_points is None or zero_points.dtype in whole, "zero points are whole numbers or bfloat16")
    demand(scales.dim() == 1 and scales.shape[0] in (1, x.shape[axis]), f"scales {tuple(scales.shape)}")
    demand(dtype == INT8 and out.dtype == torch.int8, f"type {dtype}")

    def spread(values: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[axis] = values.shape[0]
        return values.to(torch.float32).view(shape)

    codes = x.to(torch.float32) / spread(scales)
    if zero_points is not None:
        demand(zero_points.shape == scales.shape, "zero points are of the scales' shape")
        codes = codes + spread(zero_points)
    out.copy_(codes.round().clamp(-CODE_MAX - 1, CODE_MAX))


@kernel("aclnnQuantMatmulV5", "TTTTTTTTTbbIT")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    x1_scale: Tensor | None,
    x2_scale: Tensor,
    y_scale: Tensor | None,
    x1_offset: Tensor | None,
    x2_offset: Tensor | None,
    y_offset: Tensor | None,
    bias: Tensor | None,
    transpose1: bool,
    transpose2: bool,
    group_size: int,
    out: Tensor,
) -> None:
    """Multiply codes of int8 in whole numbers; scales by row and by column, then a bias. What A2 and A3 document."""
    demand(x1.dtype == torch.int8 and x2.dtype == torch.int8, f"codes of {x1.dtype} and {x2.dtype}")
    demand(x1_scale is not None and x1_scale.dtype == torch.float32, "not simulated without scales by row")
    demand(x1_scale is not None and tuple(x1_scale.shape) == (x1.shape[0],), "a scale for each row")
    demand(x2_scale.dim() == 1 and x2_scale.shape[0] in (1, x2.shape[1]), f"scales by column {tuple(x2_scale.shape)}")
    demand(x2_scale.dtype in (torch.float32, out.dtype), f"scales of {x2_scale.dtype} for results of {out.dtype}")
    demand(out.dtype in HALF, f"results of {out.dtype}")
    demand(y_scale is None and x2_offset is None and not (transpose1 or transpose2 or group_size), "not simulated")
    demand(max(x1.shape[1], x2.shape[1]) <= 65535, "a dimension over 65535")
    whole = (x1.to(torch.int64) @ x2.to(torch.int64)).to(torch.float32)
    result = whole * x2_scale.to(torch.float32) * x1_scale.unsqueeze(1)  # type: ignore[union-attr]
    if bias is not None:
        demand(bias.dtype in (torch.float32, torch.bfloat16, torch.int32), f"a bias of {bias.dtype}")
        demand(bias.dtype != torch.int32, "not simulated")
        result = result + bias.to(torch.float32)
    out.copy_(result)


@kernel("aclnnWeightQuantBatchMatmulV2", "TTTTTTTiT")
def weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
) -> None:
    """Multiply rows by a weight of codes; each scale for a column, or for `group_size` neighbours of one."""
    demand(x.dtype in HALF and weight.dtype == torch.int8, f"x {x.dtype} with codes of {weight.dtype}")
    demand(scale.dtype == x.dtype and (offset is None or offset.dtype == x.dtype), "scales and offsets of x's dtype")
    demand(quant_scale is None and quant_offset is None, "not simulated")
    demand(offset is None or offset.shape == scale.shape, "offsets are of the scales' shape")
    inputs, outputs = weight.shape
    demand(x.dim() == 2 and 1 <= inputs <= 65535 and 1 <= outputs <= 65535, f"sizes {inputs} and {outputs}")
    if group_size:
        demand(group_size % 32 == 0 and 32 <= group_size <= inputs - 1, f"groups of {group_size}")
        demand(tuple(scale.shape) == (-(-inputs // group_size), outputs), f"scales {tuple(scale.shape)}")
    else:
        demand(scale.numel() in (1, outputs), f"scales {tuple(scale.shape)}")

    def spread(values: Tensor) -> Tensor:
        wide = values.to(torch.float32)
        return wide[torch.arange(inputs) // group_size] if group_size else wide.reshape(1, -1)

    codes = weight.to(torch.float32)
    matrix = (codes if offset is None else codes + spread(offset)) * spread(scale)
    result = x.to(torch.float32) @ matrix
    if bias is not None:
        wanted = torch.float16 if x.dtype == torch.float16 else torch.float32
        demand(bias.dtype == wanted and bias.numel() == outputs, f"a bias of {bias.dtype}")
        result = result + bias.to(torch.float32).reshape(1, -1)
    out.copy_(result)
