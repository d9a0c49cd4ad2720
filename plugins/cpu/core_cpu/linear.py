"""`core::linear` by the extension's kernel: products of few rows, with weights as the model holds them.

A processor can multiply few rows as fast as it reads the weight; torch's products take up to several times as long.
oneDNN's are fast on packed weights, but these are copies: memory is taken twice, and weights that are loaded anew do
not reach them. The kernel here reads the model's own weight, about as fast (docs/cpu.md).
"""

from __future__ import annotations

import math

from torch import Tensor

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.linear.gated import LINEAR
from core_cpu import extension
from core_cpu.own_ops import own_op
from core_cpu.row_limits import DTYPES
from core_cpu.row_limits import LINEAR as LIMITS


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::linear`, or None; builds the extension for one that it can.

    call: as it stands in the graph.
    """
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if weight.stride(1) != 1:
        return "the rows of weight are not one run of memory each"
    return extension.load("linear") or _too_many(x)


def _too_many(x: Tensor) -> str | None:
    """Return that x has more rows than the kernel multiplies; None where it may have fewer."""
    leading, most = x.shape[:-1], LIMITS.limits().get(x.dtype, 0)
    rows = math.prod(size for size in leading if type(size) is int)
    if most > 0 and (rows <= most or 0 in leading):
        return None  # the kernel decides by the sizes of each bucket where these are open
    return f"x has {rows} rows of {x.dtype} or more, and torch's product is faster from {most + 1} rows on"


linear = own_op(LINEAR, "linear")

IMPLEMENTATIONS = (OpImplementation(op=LINEAR.qualified_name, name="cpu_linear", fn=linear, condition=why_not),)
