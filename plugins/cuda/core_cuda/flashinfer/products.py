"""`core::quantized_linear` of fp8 codes by FlashInfer: with one scale for each tensor, and with scales of blocks.

With one scale for each tensor it calls cuBLAS, which then sums in the matrix units' narrower registers: that gives
accuracy up, and runs for a user who names it. With scales of blocks (128 features of a row, 128 x 128 of the weight) it
has kernels of DeepGEMM for Hopper, which sum each block's products in fp32. Its other products of fp8 start at compute
capability 10.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from core_cuda.flashinfer import presence
from core_cuda.flashinfer.building import HOPPER
from core_cuda.ops import launching
from core_cuda.ops.conditions import no_codes
from core_cuda.ops.linear.quantized import FAST_SLACK as FAST_SLACK
from core_cuda.ops.registration import kernel_of

CODE = torch.float8_e4m3fn
_ALIGNED = 16
_BLOCK = 128
_COLUMNS = 64
_CUDA = (12, 8)
_SCALES = 4
"""Numbers of fp32 of which a column of scales must be a multiple, for the tensor memory accelerator."""


def _common(call: OpCall) -> str | None:
    """Return why neither product can take a call, or None."""
    args = call.args
    for name in ("x_zero_point", "w_zero_point", "bias"):
        if args[name] is not None:
            return f"it has {name}, and the kernel has none"
    for name in ("x_codes", "w_codes"):
        if args[name].dtype != CODE:
            return f"{name} are {args[name].dtype}, and the kernel takes {CODE}"
    for name in ("x_scale", "w_scale"):
        if args[name].dtype != torch.float32:
            return f"{name} is {args[name].dtype}, and the kernel takes torch.float32"
    if args["out_dtype"] != torch.bfloat16:
        return f"out_dtype is {args['out_dtype']}, and the kernel is exact enough for, or gives, torch.bfloat16 only"
    return no_codes(CODE)


def why_not_fast(call: OpCall) -> str | None:
    """Return why the product with one scale for each tensor can't take a call, or None."""
    args = call.args
    if reason := _common(call):
        return reason
    for name in ("x_scale", "w_scale"):
        if args[name].numel() != 1:
            return f"{name} has several numbers, and the kernel takes one"
    columns, depth = args["w_codes"].shape
    if columns % _ALIGNED or depth % _ALIGNED:
        return f"the weight is ({columns}, {depth}), and the kernel takes multiples of {_ALIGNED}"
    return None


@kernel_of(QUANTIZED_LINEAR, "flashinfer_fast")
def quantized_linear_fast(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    """Return what `core::quantized_linear` returns, for calls that `why_not_fast` lets pass."""
    out = x_codes.new_empty((*x_codes.shape[:-1], w_codes.shape[0]), dtype=out_dtype)
    if not out.numel():
        return out
    x, made = x_codes.reshape(1, -1, x_codes.shape[-1]).contiguous(), out.view(1, -1, out.shape[-1])
    scales = (x_scale.reshape(1), w_scale.reshape(1))
    presence.load().gemm.bmm_fp8(x, w_codes.contiguous().t()[None], *scales, out_dtype, out=made, backend="cublas")
    return out


def why_not_blocks(call: OpCall) -> str | None:
    """Return why the product with scales of blocks can't take a call, or None."""
    args = call.args
    if reason := _common(call):
        return reason
    if launching.capability() != HOPPER:
        return "it is a kernel for compute capability 9.0"
    if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) < _CUDA:
        return f"it needs CUDA {'.'.join(map(str, _CUDA))}, and this is {torch.version.cuda}"
    columns, depth = args["w_codes"].shape
    if depth % _BLOCK or columns % _BLOCK:
        return f"the weight is ({columns}, {depth}), and the kernel takes multiples of {_BLOCK}"
    if tuple(args["w_scale"].shape) != (columns // _BLOCK, depth // _BLOCK):
        return (
            f"w_scale is {tuple(args['w_scale'].shape)}, and the kernel takes one for each block of {_BLOCK} x {_BLOCK}"
        )
    if args["x_scale"].dim() < 1 or args["x_scale"].shape[-1] != depth // _BLOCK:
        return (
            f"x_scale is {tuple(args['x_scale'].shape)}, and the kernel takes one for each {_BLOCK} features of a row"
        )
    if any(one != many for one, many in zip(args["x_scale"].shape[:-1], args["x_codes"].shape[:-1], strict=True)):
        return "x_scale has fewer rows than x_codes, and the kernel takes scales for each row"
    return None


@kernel_of(QUANTIZED_LINEAR, "flashinfer_blocks")
def quantized_linear_blocks(x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, **_: Any) -> Tensor:
    """Return what `core::quantized_linear` returns, for calls that `why_not_blocks` lets pass."""
    out = x_codes.new_empty((*x_codes.shape[:-1], w_codes.shape[0]), dtype=torch.bfloat16)
    if not out.numel():
        return out
    x, made = x_codes.reshape(-1, x_codes.shape[-1]).contiguous(), out.view(-1, out.shape[-1])
    presence.load().gemm.fp8_blockscale_gemm_sm90(
        x, w_codes.contiguous(), _in_columns(x_scale.reshape(len(x), -1)), w_scale.contiguous(), out=made
    )
    return out


def _in_columns(scale: Tensor) -> Tensor:
    """Return the scales (M, G) of rows as the kernel reads them: column by column, each padded to whole 16 bytes."""
    rows, groups = scale.shape
    padded = torch.empty((groups, -(-rows // _SCALES) * _SCALES), dtype=scale.dtype, device=scale.device)
    padded[:, :rows] = scale.t()
    return padded[:, :rows].t()
