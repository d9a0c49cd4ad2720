"""`core::quantized_grouped_linear`: rows sorted by expert times the quantised weight of their own expert.

Shapes: R rows, E experts, K inputs, N outputs. x (R, K); ends (E,) int32: the rows of expert e end before ends[e] and
begin where those of the expert before it end, as the offsets of `torch._grouped_mm`; w_codes (E, N, K) int8 or fp8, or
int32 (E, N, ceil(K / 8)) for 4 bits; w_scale and w_zero_point (E, N, G), as in core/common/ops/linear/weight_only.py.

x is codes with x_scale (R, 1) or (), as `core::quantize` gives them, or floating without a scale: then weights alone
are quantised. Gate and second quantisation stand between two of these ops, where passes fuse them as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_ranks
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.linear.weight_only import check_weight_codes, unpacked
from core.common.ops.moe.experts import can_group
from core.common.ops.quantize.symmetric import RANGES, check_zero_point, dequantize


def quantized_grouped_linear(
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
) -> Tensor:
    """Return (R, N): each row of the dequantised x times the dequantised weight of its expert, in out_dtype.

    Rows behind the last end belong to no expert and give zeros. Computed in fp32, fp64 for an fp64 scale or x. Where
    `torch._grouped_mm` takes the shapes and out_dtype is bf16, sums of products are rounded to bf16 before the scales
    multiply them; weights with several scales to a row are rounded to bf16 then, too.
    """
    codes = unpacked(w_codes, num_bits, x.shape[1])
    row_experts = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
    if _fits_grouped(x, codes, out_dtype):
        return _grouped(x, x_scale, ends, codes, w_scale, w_zero_point, x_zero_point, row_experts)
    compute = at_least_fp32(torch.promote_types(w_scale.dtype, x.dtype if x_scale is None else x_scale.dtype))
    values = x.to(compute) if x_scale is None else dequantize(x, x_scale, x_zero_point, compute)
    out = values.new_zeros((x.shape[0], codes.shape[1]))
    # Every row by every expert: which rows are whose is data, and a traced graph cannot depend on it.
    for expert in range(codes.shape[0]):
        zero_point = None if w_zero_point is None else w_zero_point[expert]
        weight = dequantize(codes[expert], w_scale[expert], zero_point, compute)
        out = torch.where((row_experts == expert)[:, None], values @ weight.t(), out)
    return out.to(out_dtype)


def _fits_grouped(x: Tensor, codes: Tensor, out_dtype: torch.dtype) -> bool:
    """Tell whether the shapes and dtypes are those of `torch._grouped_mm`, whose values are all bf16."""
    if out_dtype != torch.bfloat16 or (x.is_floating_point() and x.dtype not in (torch.bfloat16, *RANGES)):
        return False
    rows, inputs = x.new_empty(x.shape, dtype=torch.bfloat16), codes.shape[2]
    # As bf16 the weights are dense, whatever the codes were cut from.
    weights = codes.new_empty(codes.shape, dtype=torch.bfloat16).transpose(1, 2)
    return inputs % 8 == 0 and can_group(rows, weights)


def _grouped(
    x: Tensor,
    x_scale: Tensor | None,
    ends: Tensor,
    codes: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None,
    x_zero_point: Tensor | None,
    row_experts: Tensor,
) -> Tensor:
    """Multiply by `torch._grouped_mm`. Codes of 8 bits and their distances from a zero point are exact in bf16."""
    rows = x if x_zero_point is None else x.to(torch.float32) - x_zero_point.to(torch.float32)
    by_row = w_scale.shape[2] == 1
    ones = torch.ones_like(w_scale) if by_row else w_scale
    # Dense, whatever larger tensors rows and codes are parts of: strides have to be multiples of 16 bytes.
    weights = dequantize(codes, ones, w_zero_point, torch.float32).to(torch.bfloat16).contiguous()
    products = torch._grouped_mm(rows.to(torch.bfloat16).contiguous(), weights.transpose(1, 2), offs=ends).to(
        torch.float32
    )
    if by_row:
        products = products * w_scale[row_experts.clamp(max=codes.shape[0] - 1), :, 0]
    if x_scale is not None:
        products = products * x_scale
    # Rows of no group hold anything.
    return products.to(torch.bfloat16).masked_fill((row_experts == codes.shape[0])[:, None], 0.0)


def _fake(
    x: Tensor, _: Tensor | None, ends: Tensor, w_codes: Tensor, *__: Any, out_dtype: torch.dtype, **___: Any
) -> Tensor:
    return x.new_empty((x.shape[0], w_codes.shape[1]), dtype=out_dtype)


def _check(
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
) -> None:
    op = "quantized_grouped_linear"
    check_floating(op, x_scale=x_scale, w_scale=w_scale)
    check_ranks(op, 1, ends=ends)
    check_ranks(op, 2, x=x)
    check_ranks(op, 3, w_codes=w_codes)
    check_weight_codes(op, w_codes, w_scale, w_zero_point, num_bits, x.shape[1])
    fits = ends.dtype == torch.int32 and ends.shape[0] == w_codes.shape[0]
    check(fits, op, f"ends must be torch.int32 of shape ({w_codes.shape[0]},), not {ends.dtype} {tuple(ends.shape)}")
    if x_scale is None:
        check(x.is_floating_point() and x.dtype not in RANGES, op, f"x of {x.dtype} without x_scale are no values")
        check(x_zero_point is None, op, "x_zero_point needs x_scale")
        return
    check(x.dtype in RANGES, op, f"x with x_scale must be {' or '.join(map(str, RANGES))}, not {x.dtype}")
    check(num_bits == 8, op, "packed weights go with x as values, without x_scale")
    fits = tuple(x_scale.shape) in ((), (x.shape[0], 1))
    check(fits, op, f"x_scale must have shape () or ({x.shape[0]}, 1), not {tuple(x_scale.shape)}")
    check_zero_point(op, "x", x, x_scale, x_zero_point)


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return both formats, weights alone, groups, zero points, experts without rows and rows without an expert."""
    int8, fp8 = torch.int8, torch.float8_e4m3fn

    def codes(code: torch.dtype, *shape: int) -> Tensor:
        return draw(*shape, scale=40.0, dtype=torch.float32).to(code)

    def scale(*shape: int) -> Tensor:
        return draw(*shape, scale=0.002, shift=0.01, dtype=draw.wide)

    def weight(code: torch.dtype, groups: int = 1, num_bits: int = 8, zero: bool = False) -> dict[str, Any]:
        packed = (draw(4, 24, 6, dtype=torch.float64) * 2**29).to(torch.int32)
        zeros = draw(4, 24, groups, scale=3.0, dtype=torch.float32).to(int8) if zero else None
        return {
            "w_codes": codes(code, 4, 24, 48) if num_bits == 8 else packed,
            "w_scale": scale(4, 24, groups),
            "w_zero_point": zeros,
            "num_bits": num_bits,
        }

    calls: dict[str, dict[str, Any]] = {}
    for code in RANGES:
        short = str(code).removeprefix("torch.")
        calls[f"{short}, token"] = {"x": codes(code, 11, 48), "x_scale": scale(11, 1), **weight(code)}
        without = f"{short}, tensor, rows of no expert"
        calls[without] = {"x": codes(code, 13, 48), "x_scale": scale(), **weight(code)}
    zeros = {"x_zero_point": draw(11, 1, scale=30.0, dtype=torch.float32).to(int8)}
    calls["zero points"] = {"x": codes(int8, 11, 48), "x_scale": scale(11, 1), **zeros, **weight(int8)}
    values = {"x": draw(11, 48), "x_scale": None}
    calls |= {
        "weights alone, fp8": {**values, **weight(fp8)},
        "weights alone, int8, zero points": {**values, **weight(int8, zero=True)},
        "weights alone, int4 by group": {**values, **weight(int8, 3, 4)},
    }
    one = weight(int8)
    one |= {name: one[name][:1] for name in ("w_codes", "w_scale")}
    ends = torch.tensor([3, 3, 8, 11], dtype=torch.int32, device=draw.device)
    calls["no tokens, one expert"] = {"x": draw(0, 48), "x_scale": None, "ends": torch.zeros_like(ends[:1]), **one}
    return {name: {"ends": ends, "out_dtype": draw.dtype, **call} for name, call in calls.items()}


def _even_ends(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give the experts the same number of rows each."""
    ends, num_rows = arguments["ends"], arguments["x"].shape[0]
    reached = torch.arange(1, len(ends) + 1, device=ends.device) * num_rows // max(len(ends), 1)
    return {"ends": reached.to(ends.dtype)}


QUANTIZED_GROUPED_LINEAR = declare(
    CanonicalOp(
        schema="quantized_grouped_linear(Tensor x, Tensor? x_scale, Tensor ends, Tensor w_codes, Tensor w_scale, "
        "Tensor? w_zero_point, *, ScalarType out_dtype, int num_bits=8, Tensor? x_zero_point=None) -> Tensor",
        reference=quantized_grouped_linear,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=14,
        indices=_even_ends,
    )
)
