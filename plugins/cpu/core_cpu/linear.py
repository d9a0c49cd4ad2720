"""`core::linear` by the extension's kernel: products of few rows, with weights as the model holds them.

A processor can multiply few rows as fast as it reads the weight; torch's products take up to several times as long.
oneDNN's are fast on packed weights, but these are copies: memory is taken twice, and weights that are loaded anew do
not reach them. The kernel here reads the model's own weight, about as fast (docs/cpu.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.linear.gated import LINEAR
from core_cpu import extension
from core_cpu.own_ops import own_op
from core_cpu.row_limits import DTYPES

MOST_ROWS = 64
"""Of x in a call that the kernel multiplies itself (csrc/linear.cpp); it hands others on to torch's product."""


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::linear`, or None; builds the extension for one that it can.

    call: as it stands in the graph.
    """
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if weight.stride(1) != 1:
        return "the rows of weight are not one run of memory each"
    return (None if x.dtype in widened() else _too_many(x)) or extension.load("linear") or None


def why_not_alike(call: OpCall) -> str | None:
    """Return why the kernel that computes all rows alike can't take a call; this never depends on how many they are."""
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if weight.stride(1) != 1:
        return "the rows of weight are not one run of memory each"
    return extension.load("linear") or None


def widened() -> tuple[torch.dtype, ...]:
    """Return the dtypes of which the kernel takes any number of rows, as csrc/linear.cpp has it: torch's own product of
    them is slower than one of numbers widened to fp32."""
    has_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return (torch.bfloat16, torch.float16) if has_avx2 else (torch.float16,)


def _too_many(x: Tensor) -> str | None:
    """Return that x has more rows than the kernel multiplies; None where it may have fewer in a bucket."""
    leading = x.shape[:-1]
    rows = math.prod(size for size in leading if type(size) is int)
    if rows <= MOST_ROWS or 0 in leading:
        return None
    return f"x has {rows} rows or more, and the kernel is for up to {MOST_ROWS}"


def why_not_transposed(call: OpCall) -> str | None:
    """Return why the kernel for weights whose columns are one run of memory can't take a call of `core::linear`."""
    return _no_transposed(call) or _too_many(call.args["x"]) or extension.load("linear_transposed") or None


def why_not_transposed_alike(call: OpCall) -> str | None:
    """Return the same of the form that computes all rows alike; this never depends on how many they are."""
    return _no_transposed(call) or extension.load("linear_transposed") or None


def _no_transposed(call: OpCall) -> str | None:
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if weight.stride(0) != 1 or weight.stride(1) == 1:
        return "the columns of weight are not one run of memory each"
    return None


linear = own_op(LINEAR, "linear")
linear_transposed = own_op(LINEAR, "linear_transposed", "_transposed")
linear_alike = own_op(LINEAR, "linear", "_alike")
linear_transposed_alike = own_op(LINEAR, "linear_transposed", "_transposed_alike")

IMPLEMENTATIONS = (
    OpImplementation(op=LINEAR.qualified_name, name="cpu_linear", fn=linear, condition=why_not),
    OpImplementation(
        op=LINEAR.qualified_name, name="cpu_linear_transposed", fn=linear_transposed, condition=why_not_transposed
    ),
    # What these are timed against, for each shape: which of them is faster depends on both, and on the processor.
    OpImplementation(
        op=LINEAR.qualified_name,
        name="torch_linear",
        fn=torch.ops.aten.linear.default,
        condition=lambda call: why_not(call) and why_not_transposed(call),
        timed=lambda call: _too_many(call.args["x"]),
    ),
    *(
        OpImplementation(
            op=LINEAR.qualified_name,
            name=name,
            fn=function,
            condition=condition,
            batch_invariant=True,
            on_request=True,
        )
        for name, function, condition in (
            ("cpu_linear_alike", linear_alike, why_not_alike),
            ("cpu_linear_transposed_alike", linear_transposed_alike, why_not_transposed_alike),
        )
    ),
)
"""The kernels, torch's product for the same calls, and the kernels for any number of rows, their sums in one order."""
