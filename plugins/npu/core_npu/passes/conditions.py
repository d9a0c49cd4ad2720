"""Conditions of CANN's fused kernels: dtypes, shapes, alignment; each returns a reason why not, or "".

From CANN's operator documentation for Atlas A2 and A3 (aclnnAddRmsNorm and those named after it). Symbolic sizes are
checked in every bucket that the graph serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from core.common.passes import PassContext, same_sizes, value_of, view

__all__ = [
    "CODES",
    "HALVES",
    "aligned_rows",
    "first_reason",
    "is_row",
    "last_axis",
    "not_row",
    "one_scale",
    "same_tensors",
    "static_scales",
    "widened",
]

HALVES = frozenset({torch.float16, torch.bfloat16})
CODES = HALVES | {torch.int8}
"""For guards of passes whose sites end in codes: a guard looks at the result, the conditions at what is normed."""
_ALIGNMENT = 32
_HALF, _BRAIN, _WIDE = torch.float16, torch.bfloat16, torch.float32
_SCALES = {
    (_HALF, True): (_WIDE, _HALF),
    (_HALF, False): (_HALF,),
    (_BRAIN, True): (_BRAIN,),
    (_BRAIN, False): (_BRAIN,),
}
_ZERO_POINTS = {**_SCALES, (_HALF, True): (torch.int32, torch.int8), (_HALF, False): ()}
"""Of the values' dtype and whether the scales divide, what both `npu_quantize` and the kernel of norm and quantisation
take, or what widens to the kernel's without a rounding. Dividing, `npu_quantize` takes scales of fp32 with values of
fp16, or of fp16, which it widens itself; multiplying, scales and zero points of the values' dtype alone."""
_WIDENED = {_HALF: _WIDE, torch.int8: torch.int32}


def first_reason(*reasons: str) -> str:
    """Return the first reason, or ""."""
    return next((reason for reason in reasons if reason), "")


def same_tensors(context: PassContext, first: Any, second: Any) -> str:
    """Return why two operands are not tensors of one shape, dtype and device, or ""."""
    left, right = value_of(first), value_of(second)
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return f"{first} and {second} are not both tensors"
    if left.dtype != right.dtype or left.device != right.device:
        return f"{first} is {left.dtype} on {left.device}, {second} {right.dtype} on {right.device}"
    return (
        "" if context.served_alike(tuple(left.shape), tuple(right.shape)) else f"{first} and {second} differ in shape"
    )


def aligned_rows(context: PassContext, x: fx.Node) -> str:
    """Return why rows of x are no whole number of 32-byte blocks, or of another dtype than kernels take; or nothing."""
    dtype, shape = view.dtype(x), view.shape(x)
    if dtype not in HALVES or not shape:
        return f"{x} is {dtype}, the kernel takes {' and '.join(sorted(map(str, HALVES)))}"
    sizes = context.served(shape[-1])
    if sizes is None:
        return f"how long the rows of {x} are is unknown"
    assert dtype is not None
    odd = [size * dtype.itemsize for size in sizes if size * dtype.itemsize % _ALIGNMENT]
    return f"rows of {x} have {odd[0]} bytes, no multiple of {_ALIGNMENT}" if odd else ""


def is_row(operand: Any, x: fx.Node) -> bool:
    """Return whether an operand is a tensor (D,) of x's dtype, D being the size of x's rows."""
    return view.dtype(operand) == view.dtype(x) and _has_row_shape(operand, x)


def not_row(name: str, operand: Any, x: fx.Node) -> str:
    """Return why an operand that is a row's parameter is none of x's dtype and row size, or nothing; None is none."""
    if operand is None or is_row(operand, x):
        return ""
    found = f"{view.dtype(operand)} of shape {_text(view.shape(operand))}"
    return f"{name} {operand} is {found}, {x} has rows of {view.dtype(x)}, {_text((view.shape(x) or ())[-1:])}"


def static_scales(scales: Any, zero_points: Any, x: fx.Node, *, divides: bool) -> str:
    """Return why the kernel does not take these scales and zero points for values like x, or nothing."""
    dtype = view.dtype(x)
    if dtype not in HALVES:
        return f"{x} is {dtype}"
    assert dtype is not None
    for name, operand, table in (("scales", scales, _SCALES), ("zero points", zero_points, _ZERO_POINTS)):
        if operand is None:
            continue
        kinds = table[dtype, divides]
        if view.dtype(operand) not in kinds:
            wanted = " or ".join(map(str, kinds)) or f"no {name}"
            how = "divide" if divides else "multiply"
            return f"{name} {operand} are {view.dtype(operand)}, the fusion takes {wanted} with scales that {how}"
        if not _has_row_shape(operand, x):
            found, row = _text(view.shape(operand)), _text((view.shape(x) or ())[-1:])
            return f"{name} {operand} have shape {found}, the kernel takes one of each channel, {row}"
    return ""


def widened(operand: Any) -> torch.dtype | None:
    """Return the dtype that scales or zero points have to be cast to, None where they need not."""
    dtype = view.dtype(operand)
    return None if dtype is None else _WIDENED.get(dtype)


def one_scale(scale: Any, x: fx.Node) -> str:
    """Return why a scale is not a one-dimensional tensor with one element of x's dtype, or ""."""
    found, dtype = view.shape(scale), view.dtype(scale)
    if found is not None and len(found) == 1 and same_sizes(found, (1,)) and dtype == view.dtype(x):
        return ""
    return f"scale {scale} is {dtype} of shape {_text(found)}, the kernel takes one of {view.dtype(x)}"


def last_axis(axis: Any, x: fx.Node) -> str:
    """Return why an axis is not x's last one, or ""."""
    rank = len(view.shape(x) or ())
    return "" if axis in (-1, rank - 1) else f"its scales lie along axis {axis} of {rank}, the kernel's along the last"


def _has_row_shape(operand: Any, x: fx.Node) -> bool:
    shape, rows = view.shape(operand), view.shape(x)
    return shape is not None and bool(rows) and same_sizes(shape, (rows or ())[-1:])


def _text(shape: tuple[Any, ...] | None) -> str:
    return str(tuple(shape)) if shape is not None else "unknown"
