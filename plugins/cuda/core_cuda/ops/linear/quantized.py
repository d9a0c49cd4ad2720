"""`core::quantized_linear`: of int8 codes by the plugin's own kernel; of fp8 by its own for few rows, torch's for many.

Which one is decided call by call from the real sizes, as for `core::linear`; for sizes that nobody measured the others
are implementations of their own, which are timed when a program is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from core_cuda.ops import launching
from core_cuda.ops.conditions import no_codes
from core_cuda.ops.linear import skinny_configs
from core_cuda.ops.linear.coded import coded_linear
from core_cuda.ops.linear.coded_configs import CodedConfig, CodedShape
from core_cuda.ops.linear.coded_configs import default_config as default_coded
from core_cuda.ops.linear.scaled import ALIGNED, WAYS, scaled_linear
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import MAX_ROWS, SkinnyConfig
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

CODE = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16)
"""Not fp32: on an H200 neither torch's kernels nor these came near its rounding. Sums of int8 are exact."""
MAX_INT8_DEPTH = 2**31 // 128**2 - 1
"""Products of int8 whose sum int32 holds in any case."""
_BITS = 8
_FEW_ROWS, _FEW_ROWS_HOPPER = 32, 64
"""Rows up to which the kernels here serve sizes that nobody measured."""
_MAX_TIMED_ROWS = 512
"""Rows up to which the library's other way is timed; beyond, the one that writes its result twice always loses."""
_LIBRARY = (SkinnyConfig("rowwise", 0, 0), SkinnyConfig("tensor", 0, 0))
_TILE = 128
"""Rows and columns of a tile of the result in the library's kernels for many rows."""
FAST_SLACK = 2.0
"""By how much the bounds of the numeric criterion have to be wider for sums in the narrower way."""
_TOGETHER = ("x_codes", "x_scale", "w_codes", "w_scale", "bias", "out_dtype")


def _product(
    choose: Callable[[int, int, int], SkinnyConfig], *, fast: bool = False, early: bool = False
) -> Callable[..., Tensor]:
    """Return a kernel of the op. choose: takes rows, columns and depth; fast, early: as for `multiply`."""

    def product(
        x_codes: Tensor,
        x_scale: Tensor,
        w_codes: Tensor,
        w_scale: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype,
        **_: Any,
    ) -> Tensor:
        columns, depth = w_codes.shape
        x = x_codes.reshape(-1, depth)
        if x.shape[0] == 0:
            return x.new_empty((*x_codes.shape[:-1], columns), dtype=out_dtype)
        scales = (x_scale.reshape(-1).contiguous(), w_scale.reshape(-1).contiguous())
        if w_codes.dtype == torch.int8:
            out = multiply_int8(x, w_codes, scales, bias, out_dtype, int8_config(x.shape[0], columns, depth))
        else:
            config = choose(x.shape[0], columns, depth)
            out = multiply(x, w_codes, scales, bias, out_dtype, config, fast=fast, early=early)
        return out.view(*x_codes.shape[:-1], columns)

    return product


def multiply(
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: SkinnyConfig,
    *,
    fast: bool = False,
    early: bool = False,
) -> Tensor:
    """Return `x @ weight.T * scales + bias` (M, N) as config says; its kernel may be one of `scaled_linear.WAYS` too.

    x (M, K) and weight (N, K) of fp8; scales: (M,) or (1,), and (N,) or (1,), fp32; bias (N,). Where the named kernel
    cannot give out_dtype, its sibling does. fast: as for `scaled_linear`; the plugin's own kernels sum in fp32 all the
    same. early: as for `skinny_linear`.
    """
    if config.kernel not in WAYS:
        x = x if x.stride(1) == 1 else x.contiguous()
        out: Tensor = skinny_linear(x, weight, bias, scales=scales, out_dtype=out_dtype, config=config, early=early)
        return out
    way = config.kernel if _is_narrow(out_dtype, bias) else "tensor"
    return scaled_linear(x.contiguous(), weight.contiguous(), scales, bias, out_dtype, way, fast=fast)


def multiply_int8(
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: CodedConfig,
) -> Tensor:
    """Return `x @ weight.T * scales + bias` (M, N) of int8 x (M, K) and weight (N, K), summed exactly."""
    x = x if x.stride(1) == 1 else x.contiguous()
    x_scale, w_scale = scales
    return coded_linear(x, weight, w_scale[:, None], None, bias, x_scale=x_scale, out_dtype=out_dtype, config=config)


def int8_shape(rows: int, columns: int, depth: int) -> CodedShape:
    """Return the sizes of a product of int8."""
    return CodedShape(rows, columns, depth, _BITS, depth, coded_x=True)


def int8_config(rows: int, columns: int, depth: int) -> CodedConfig:
    """Return what was measured on this GPU for a product of int8, else what the sizes suggest."""
    known, config = winner("int8_linear", {"rows": rows, "columns": columns, "depth": depth}, ranged=("rows",))
    return CodedConfig(**config) if known and config else default_coded(int8_shape(rows, columns, depth))


def candidates(rows: int, columns: int, depth: int) -> Iterator[SkinnyConfig]:
    """Yield what is worth measuring at these sizes."""
    for way in WAYS:
        yield SkinnyConfig(way, 0, 0)
    if rows <= MAX_ROWS:
        yield from skinny_configs.candidates(rows, columns, depth, bits=_BITS)


def _choose(rows: int, columns: int, depth: int) -> SkinnyConfig:
    """Return what was measured on this GPU, else what the sizes suggest."""
    known, config = _measured(rows, columns, depth)
    if known and config is not None:
        return SkinnyConfig(**config)
    if rows <= _few_rows():
        return skinny_configs.default_config(rows, columns, depth, bits=_BITS)
    return _LIBRARY[_few_tiles(rows, columns)]


def _other_library(rows: int, columns: int, depth: int) -> SkinnyConfig:
    """Return what `_choose` does not choose of the library where nobody measured."""
    if rows <= _few_rows():
        return _LIBRARY[_few_tiles(rows, columns)]
    return _LIBRARY[not _few_tiles(rows, columns)]


def _measured(rows: int, columns: int, depth: int) -> tuple[bool, Mapping[str, Any] | None]:
    return winner("quantized_linear", {"rows": rows, "columns": columns, "depth": depth}, ranged=("rows",))


def _few_rows() -> int:
    return _FEW_ROWS_HOPPER if skinny_configs.is_hopper() else _FEW_ROWS


def _few_tiles(rows: int, columns: int) -> bool:
    """Tell whether tiles of the result leave half of the GPU idle, where the sum over K is not shared out."""
    return bool(2 * triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE) <= launching.num_multiprocessors())


def library_timed(call: OpCall) -> str | None:
    """Return why the library's other way is not worth timing at the sizes of a call, or None."""
    args = call.args
    columns, depth = args["w_codes"].shape
    rows = args["x_codes"].numel() // max(depth, 1)
    if not 0 < rows <= _MAX_TIMED_ROWS:
        return f"it has {rows} rows, and is worth timing for 1 to {_MAX_TIMED_ROWS}"
    if _measured(rows, columns, depth)[0]:
        return "what was measured on this GPU is known"
    one_scale = args["x_scale"].numel() == args["w_scale"].numel() == 1 and args["bias"] is None
    if rows > _few_rows() and (one_scale or not _is_narrow(args["out_dtype"], args["bias"])):
        return "both ways of the library are one for these scales and dtypes"
    return None


def late_timed(call: OpCall) -> str | None:
    """Say why the kernel that reads codes no earlier than it must is not worth timing.

    On an H100 it took longer at 19 of 24 sizes of 8B and 1B, by up to 27 %, and at three 1 to 3 % less.
    """
    return "the same kernel that reads codes early is faster, or about as fast"


def _is_narrow(out_dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Tell whether the library can scale rows and columns itself."""
    return out_dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)


quantized_linear_early = kernel_of(QUANTIZED_LINEAR, "early")(_product(_choose, early=True))
quantized_linear = kernel_of(QUANTIZED_LINEAR)(_product(_choose))
quantized_linear_library = kernel_of(QUANTIZED_LINEAR, "library")(_product(_other_library))
quantized_linear_fast = kernel_of(QUANTIZED_LINEAR, "fast")(_product(_choose, fast=True))


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call, or None."""
    args = call.args
    for name, value in args.items():
        if name not in _TOGETHER and value is not None:
            return f"it has {name}, and the kernels know symmetric codes only"
    code = args["w_codes"].dtype
    if args["x_codes"].dtype != code:
        return f"x_codes are {args['x_codes'].dtype} and w_codes {code}, and the kernels take codes of one dtype"
    if reason := no_codes(code):
        return reason
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
    if code == torch.int8:
        return f"rows are {depth} long, and int32 sums at most {MAX_INT8_DEPTH}" if depth > MAX_INT8_DEPTH else None
    if columns % ALIGNED or depth % ALIGNED:
        return f"the weight is ({columns}, {depth}), and the kernels take multiples of {ALIGNED}"
    if args["out_dtype"] not in OUT_DTYPES:
        given = ", ".join(map(str, OUT_DTYPES))
        return f"out_dtype is {args['out_dtype']}, and products of codes are summed exactly enough for {given} only"
    return None


def why_not_early(call: OpCall) -> str | None:
    """Return why codes cannot be read before earlier kernels have ended, or None."""
    if "w_codes" not in call.constants:
        return "w_codes are no constant that is bound to the graph, and can't be read ahead of time"
    if call.args["w_codes"].dtype != CODE or not skinny_configs.is_hopper():
        return f"it reads {CODE} ahead of time at compute capability 9 only"
    return why_not(call)


def why_not_library(call: OpCall) -> str | None:
    """Return why the library's kernels cannot take a call, or None."""
    if call.args["w_codes"].dtype != CODE:
        return f"w_codes are {call.args['w_codes'].dtype}, and the kernels of the library take {CODE}"
    return why_not(call)


def why_not_fast(call: OpCall) -> str | None:
    """Return why the kernel that sums in the narrower way cannot take a call, or None."""
    if call.args["out_dtype"] != torch.bfloat16:
        return f"out_dtype is {call.args['out_dtype']}, and sums in the narrower way are exact enough for bfloat16 only"
    return why_not_library(call)
