"""`core::quantized_linear` by the extension's kernel: int8 codes times int8 codes, summed as integers.

The sums are exact, so the kernel's error is that of the scales and of one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from core_cpu import extension
from core_cpu.own_ops import own_op
from core_cpu.passes.shared_codes import join_quantized_linears
from core_cpu.row_limits import DTYPES

MOST_INPUTS = (2**31 - 1) // 128**2
"""So many products of int8 codes fit into int32, whatever the codes."""


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::quantized_linear`, or None; builds the extension for one.

    call: as it stands in the graph.
    """
    x, weight, out = (call.args[name] for name in ("x_codes", "w_codes", "out_dtype"))
    if {x.dtype, weight.dtype} != {torch.int8}:
        return f"codes are {x.dtype} and {weight.dtype}, and the kernel takes torch.int8"
    if out not in DTYPES:
        return f"out_dtype is {out}, and the kernel writes {', '.join(map(str, DTYPES))}"
    if weight.shape[1] > MOST_INPUTS:
        return f"sums of {weight.shape[1]} products may pass int32, which holds those of {MOST_INPUTS}"
    zeros = {name: call.args[f"{name}_zero_point"] for name in ("x", "w")}
    if any(zero is not None for zero in zeros.values()) and weight.shape[1] > MOST_INPUTS // 4:
        return f"sums of {weight.shape[1]} products with zero points may pass int32, which holds {MOST_INPUTS // 4}"
    for name, codes in (("x", x), ("w", weight)):
        if reason := _other_regions(f"{name}_scale", call.args[f"{name}_scale"], codes):
            return reason
    return extension.load("quantized_linear") or None


def _other_regions(name: str, scale: Tensor, codes: Tensor) -> str | None:
    """Return that a scale is neither one number in fp32 nor one for each row of the codes; None where it is."""
    if scale.dtype != torch.float32:
        return f"{name} is {scale.dtype}, and the kernel takes torch.float32"
    ones = all(type(size) is int and size == 1 for size in scale.shape)
    if ones or tuple(scale.shape) == (*codes.shape[:-1], 1):
        return None
    return f"{name} {tuple(scale.shape)} is neither one number nor one for each row, which the kernel takes"


quantized_linear = own_op(QUANTIZED_LINEAR, "quantized_linear")

_MOST_TOGETHER = 3
"""Query, key and value."""


def _together(count: int) -> torch._ops.OpOverload:
    """Declare and return the op of so many products of the same codes, without zero points."""
    weights = ", ".join(f"Tensor w_codes_{i}, Tensor w_scale_{i}, Tensor? bias_{i}" for i in range(count))
    results = ", ".join(["Tensor"] * count)

    def each(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """Let a function of one product give all of them."""

        def all_of(codes: Tensor, scale: Tensor, *weights: Any, out_dtype: torch.dtype) -> tuple[Tensor, ...]:
            one = partial(function, codes, scale, out_dtype=out_dtype)
            return tuple(one(*weights[i : i + 3]) for i in range(0, len(weights), 3))

        return all_of

    op = CanonicalOp(
        schema=f"quantized_linears_{count}(Tensor x_codes, Tensor x_scale, {weights}, *, ScalarType out_dtype) "
        f"-> ({results})",
        reference=each(QUANTIZED_LINEAR.reference),
        fake=each(QUANTIZED_LINEAR.fake),
        calls=lambda _draw: {},
    )
    return own_op(op, "quantized_linear")


TOGETHER = {count: _together(count) for count in range(2, _MOST_TOGETHER + 1)}
"""The op of so many products of the same codes: these are arranged once, and threads begin and end once."""

IMPLEMENTATIONS = (
    OpImplementation(
        op=QUANTIZED_LINEAR.qualified_name, name="cpu_quantized_linear", fn=quantized_linear, condition=why_not
    ),
)

PASSES = (join_quantized_linears(TOGETHER, why_not),)
"""What brings calls of the ops for several products into a graph."""
