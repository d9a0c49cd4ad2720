"""`core::quantized_linear` of fp8 codes: the plugin's own kernels for few rows, torch's for many.

Which one is decided call by call from the real sizes, as for `core::linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from core_cuda.ops.linear import skinny_configs
from core_cuda.ops.linear.scaled import ALIGNED, WAYS, scaled_linear
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import MAX_ROWS, SkinnyConfig
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

CODE = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16)
"""Not fp32: on an H200 neither torch's kernels nor these came near its rounding."""
_BITS = 8
_MAX_UNMEASURED_ROWS = 32
"""Rows up to which the kernels here serve sizes that nobody measured."""
_TOGETHER = ("x_codes", "x_scale", "w_codes", "w_scale", "bias", "out_dtype")


@kernel_of(QUANTIZED_LINEAR)
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
    """Multiply by the skinny kernels or torch's, as `core_cuda.tuned` says for these sizes, and scale once."""
    columns, depth = w_codes.shape
    x = x_codes.reshape(-1, depth)
    if x.shape[0] == 0:
        return x.new_empty((*x_codes.shape[:-1], columns), dtype=out_dtype)
    scales = (x_scale.reshape(-1), w_scale.reshape(-1))
    found = _choose(x.shape[0], columns, depth)
    return multiply(x, w_codes, scales, bias, out_dtype, found).view(*x_codes.shape[:-1], columns)


def multiply(
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: SkinnyConfig,
) -> Tensor:
    """Return `x @ weight.T * scales + bias` (M, N) as config says; its kernel may be one of `scaled_linear.WAYS` too.

    x (M, K) and weight (N, K) of fp8; scales: (M,) or (1,), and (N,) or (1,), fp32; bias (N,). Where the named kernel
    cannot give out_dtype, its sibling does.
    """
    if config.kernel not in WAYS:
        x = x if x.stride(1) == 1 else x.contiguous()
        out: Tensor = skinny_linear(x, weight, bias, scales=scales, out_dtype=out_dtype, config=config)
        return out
    narrow = out_dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)
    return scaled_linear(
        x.contiguous(), weight.contiguous(), scales, bias, out_dtype, config.kernel if narrow else "tensor"
    )


def candidates(rows: int, columns: int, depth: int) -> Iterator[SkinnyConfig]:
    """Yield what is worth measuring at these sizes."""
    for way in WAYS:
        yield SkinnyConfig(way, 0, 0)
    if rows <= MAX_ROWS:
        yield from skinny_configs.candidates(rows, columns, depth, bits=_BITS)


def _choose(rows: int, columns: int, depth: int) -> SkinnyConfig:
    known, config = winner("quantized_linear", {"rows": rows, "columns": columns, "depth": depth}, ranged=("rows",))
    if known and config is not None:
        return SkinnyConfig(**config)
    if rows <= _MAX_UNMEASURED_ROWS:
        return skinny_configs.default_config(rows, columns, depth, bits=_BITS)
    return SkinnyConfig("tensor" if rows <= MAX_ROWS else "rowwise", 0, 0)


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call, or None."""
    args = call.args
    for name, value in args.items():
        if name not in _TOGETHER and value is not None:
            return f"it has {name}, and the kernels know symmetric codes only"
    for name in ("x_codes", "w_codes"):
        if args[name].dtype != CODE:
            return f"{name} are {args[name].dtype}, and the kernels take {CODE}"
    for name in ("x_scale", "w_scale"):
        if args[name].dtype != torch.float32:
            return f"{name} is {args[name].dtype}, and the kernels take torch.float32"
        if args[name].dim() and args[name].shape[-1] != 1:
            return f"{name} has {args[name].shape[-1]} scales for each row, and the kernels take one"
    columns, depth = args["w_codes"].shape
    if args["w_scale"].dim() and args["w_scale"].shape[0] not in (1, columns):
        return f"w_scale has {args['w_scale'].shape[0]} rows, and the kernels take one for each of {columns}, or one"
    if any(one != many for one, many in zip(args["x_scale"].shape[:-1], args["x_codes"].shape[:-1], strict=False)):
        return "x_scale has fewer rows than x_codes, and the kernels take one scale for each row, or one in all"
    if columns % ALIGNED or depth % ALIGNED:
        return f"the weight is ({columns}, {depth}), and the kernels take multiples of {ALIGNED}"
    if args["out_dtype"] not in OUT_DTYPES:
        given = ", ".join(map(str, OUT_DTYPES))
        return f"out_dtype is {args['out_dtype']}, and products of codes are summed exactly enough for {given} only"
    return None
