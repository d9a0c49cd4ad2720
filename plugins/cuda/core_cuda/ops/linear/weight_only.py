"""`core::weight_only_linear`: codes turned into numbers within the product, or for many rows before it, once.

Within the product each tile of rows turns the weight into numbers anew, in registers, and reads codes alone. Many rows
are multiplied by cuBLAS, whose product is faster than any that unpacks, by a weight that is written to memory first.
Which one is decided call by call from the real sizes, as for `core::linear`; for sizes that nobody measured the other
one is an implementation of its own, which is timed when a program is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from core.common.ops.implementation import OpCall
from core.common.ops.linear.weight_only import CODES_PER_WORD, WEIGHT_ONLY_LINEAR
from core_cuda.ops import launching
from core_cuda.ops.conditions import no_codes
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.linear import coded_configs, hopper_coded
from core_cuda.ops.linear.coded import coded_linear
from core_cuda.ops.linear.coded_configs import CodedConfig, CodedShape, default_config, why_no_tile
from core_cuda.ops.linear.hopper_coded import hopper_coded_linear
from core_cuda.ops.linear.skinny_configs import is_hopper
from core_cuda.ops.packed import unpack
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_UNMEASURED_ROWS = {4: 128, 8: 256}
"""Rows up to which sizes that nobody measured are multiplied by codes, by bits of a code."""
_TIMED_ROWS = range(33, 2049)
"""Rows for which the other way is timed; beyond either end it always lost."""
_BLOCK, _VALUES = 1024, 4096  # codes of a row, and codes in all, of a program that turns them into numbers


@triton.jit
def _dequantize_kernel(
    codes, scale, zeros, out, N, K, C, stride_w, stride_s, stride_z, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out (N, K) = (codes - zeros) * scale. C: codes or words in a row; GROUP: 0 for one scale a row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]
    PER_WORD: tl.constexpr = 32 // BITS if BITS < 8 else 1
    places = first // PER_WORD + tl.arange(0, BLOCK // PER_WORD)[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    loaded = tl.load(codes + rows * stride_w + places, mask=(rows < N) & (places < C), other=0.0)
    numbers = unpack(loaded, 0.0) if BITS < 8 else loaded.to(tl.float32)
    if GROUP == 0:
        group = 0
    elif GROUP % BLOCK == 0:
        group = first // GROUP
    else:
        group = tl.minimum(columns, K - 1) // GROUP
    if HAS_ZERO:
        numbers -= tl.load(zeros + rows * stride_z + group, mask=rows < N, other=0).to(tl.float32)
    numbers *= tl.load(scale + rows * stride_s + group, mask=rows < N, other=0.0)
    tl.store(out + rows * K + columns, numbers.to(out.dtype.element_ty), mask=(rows < N) & (columns < K))


def dequantized(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, depth: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight (N, depth) that codes stand for, computed in fp32 and rounded once, to dtype.

    codes (N, depth) int8 or fp8, or words of 4-bit codes (N, ceil(depth / 8)) int32; scale (N, G) fp32; zero_point
    (N, G) int8.
    """
    columns, groups = scale.shape
    codes, scale = (t if t.stride(1) == 1 else t.contiguous() for t in (codes, scale))
    out = torch.empty((columns, depth), dtype=dtype, device=codes.device)
    zeros = out if zero_point is None else zero_point if zero_point.stride(1) == 1 else zero_point.contiguous()
    group = depth // groups
    block = min(_BLOCK, triton.next_power_of_2(max(depth, CODES_PER_WORD)))
    if groups > 1 and group & -group >= coded_configs.MIN_GROUP:
        block = min(block, group & -group)  # within one group, so that a row has one scale
    rows = _VALUES // block
    launching.launch(
        _dequantize_kernel, (triton.cdiv(columns, rows), triton.cdiv(depth, block)), codes, scale, zeros, out, columns,
        depth, codes.shape[1], codes.stride(0), scale.stride(0), zeros.stride(0), BITS=bits,
        GROUP=group if groups > 1 else 0, HAS_ZERO=zero_point is not None, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


def multiply(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: int,
    config: CodedConfig | None,
) -> Tensor:
    """Return the product (M, N) of x (M, K) as config says; None: by cuBLAS, of a weight rounded to x's dtype."""
    if config is None:
        return functional.linear(x, dequantized(codes, scale, zero_point, bits, x.shape[1], x.dtype), bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    return coded_linear(x, codes, scale, zero_point, bias, bits=bits, config=config)


def candidates(shape: CodedShape) -> Iterator[CodedConfig]:
    """Yield what is worth measuring at these sizes, beside cuBLAS."""
    if why_no_tile(shape) is None:
        yield from coded_configs.candidates(shape)


def shape_of(x: Tensor, codes: Tensor, scale: Tensor, bits: int) -> CodedShape:
    """Return the sizes of a call."""
    depth = x.shape[-1]
    return CodedShape(x.numel() // max(depth, 1), codes.shape[0], depth, bits, depth // scale.shape[1])


def _choose(shape: CodedShape, code: torch.dtype) -> CodedConfig | None:
    """Return what was measured on this GPU, else what the sizes suggest; None for cuBLAS."""
    known, config = _measured(shape, code)
    if known:
        return CodedConfig(**config) if config else None
    return default_config(shape) if _is_few(shape) else None


def _choose_other(shape: CodedShape, code: torch.dtype) -> CodedConfig | None:
    """Return what `_choose` does not choose where nobody measured; cuBLAS where the kernel cannot be chosen."""
    return None if _is_few(shape) or why_no_tile(shape) else default_config(shape)


def _is_few(shape: CodedShape) -> bool:
    return shape.rows <= _MAX_UNMEASURED_ROWS[shape.bits] and why_no_tile(shape) is None


def _measured(shape: CodedShape, code: torch.dtype) -> tuple[bool, Any]:
    sizes = {name: getattr(shape, name) for name in ("rows", "columns", "depth", "group")}
    return winner("weight_only_linear", sizes | {"codes": str(code).removeprefix("torch.")}, ranged=("rows",))


def _product(
    choose: Callable[[CodedShape, torch.dtype], CodedConfig | None], *, early: bool = False
) -> Callable[..., Tensor]:
    """Return a kernel of the op. early: whether few rows go to the kernel that reads the weight ahead of time."""

    def product(
        x: Tensor, w_codes: Tensor, w_scale: Tensor, w_zero_point: Tensor | None, bias: Tensor | None, *, num_bits: int
    ) -> Tensor:
        columns, depth = w_codes.shape[0], x.shape[-1]
        rows = x.reshape(-1, depth)
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], columns))
        shape = shape_of(x, w_codes, w_scale, num_bits)
        if early and shape.rows <= hopper_coded.MAX_ROWS and hopper_coded.takes(rows, w_codes):
            out = hopper_coded_linear(rows, w_codes, w_scale, w_zero_point, bias, bits=num_bits)
        else:
            config = choose(shape, w_codes.dtype)
            out = multiply(rows, w_codes, w_scale, w_zero_point, bias, num_bits, config)
        return out.view(*x.shape[:-1], columns)

    return product


weight_only_linear_early = kernel_of(WEIGHT_ONLY_LINEAR, "early")(_product(_choose, early=True))
weight_only_linear = kernel_of(WEIGHT_ONLY_LINEAR)(_product(_choose))
weight_only_linear_other = kernel_of(WEIGHT_ONLY_LINEAR, "other")(_product(_choose_other))


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call, or None."""
    x, codes, scale, bias = (call.args[name] for name in ("x", "w_codes", "w_scale", "bias"))
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, and the kernels take {', '.join(map(str, _DTYPES))}"
    if reason := no_codes(codes.dtype):
        return reason
    if scale.dtype != torch.float32:
        return f"w_scale is {scale.dtype}, and the kernels take torch.float32"
    if bias is not None and bias.dtype != x.dtype:
        return f"bias is {bias.dtype} and x {x.dtype}, and cuBLAS adds a bias of x's dtype only"
    return None


def why_not_early(call: OpCall) -> str | None:
    """Return why the weight cannot be read before earlier kernels have ended, or None."""
    held = {"w_codes", "w_scale", "w_zero_point"} - {name for name, value in call.args.items() if value is None}
    if not held <= call.constants:
        missing = ", ".join(sorted(held - call.constants))
        return f"{missing} are no constants that are bound to the graph, and can't be read ahead of time"
    if not is_hopper():
        return "it reads weights ahead of time at compute capability 9 only"
    x, codes, scale = (call.args[name] for name in ("x", "w_codes", "w_scale"))
    return hopper_coded.why_not(shape_of(x, codes, scale, call.args["num_bits"])) or why_not(call)


def late_timed(call: OpCall) -> str | None:
    """Return why the kernel that reads weights no earlier than it must is not worth timing, or None."""
    rows = call.args["x"].numel() // max(call.args["x"].shape[-1], 1)
    if rows > hopper_coded.MAX_ROWS:
        return f"it has {rows} rows, for which both kernels are one"
    return None


def other_timed(call: OpCall) -> str | None:
    """Return why the other way is not worth timing at the sizes of a call, or None."""
    x, codes, scale = (call.args[name] for name in ("x", "w_codes", "w_scale"))
    shape = shape_of(x, codes, scale, call.args["num_bits"])
    if shape.rows not in _TIMED_ROWS:
        return f"it has {shape.rows} rows, and is worth timing for {_TIMED_ROWS[0]} to {_TIMED_ROWS[-1]}"
    if _measured(shape, codes.dtype)[0]:
        return "what was measured on this GPU is known"
    return why_no_tile(shape)
