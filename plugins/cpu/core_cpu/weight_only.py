"""`core::weight_only_linear` by the extension's kernel: weights of int8 and packed 4-bit codes, each read once.

Few rows are multiplied by codes that become numbers in registers. For more rows the kernel turns some columns at a time
into numbers of fp32, which stay in the cache for torch's product; from how many rows on is measured (row_limits.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.linear.weight_only import CODES_PER_WORD, PACKED_BITS, WEIGHT_ONLY_LINEAR
from core_cpu import extension
from core_cpu.own_ops import own_op
from core_cpu.row_limits import DTYPES


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::weight_only_linear`, or None; builds the extension for one.

    call: as it stands in the graph.
    """
    x, codes, scale = (call.args[name] for name in ("x", "w_codes", "w_scale"))
    packed = call.args["num_bits"] == PACKED_BITS
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if codes.dtype != (torch.int32 if packed else torch.int8):
        return f"codes of 8 bits are {codes.dtype}, and the kernel takes torch.int8"
    if scale.dtype != torch.float32:
        return f"w_scale is {scale.dtype}, and the kernel takes torch.float32"
    return (_uneven(x, scale) if packed else None) or extension.load("weight_only_linear") or None


def _uneven(x: Tensor, scale: Tensor) -> str | None:
    """Return that codes of one int32 have different scales; None where they do not."""
    size = x.shape[-1] // scale.shape[1]
    if scale.shape[1] == 1 or size % CODES_PER_WORD == 0:
        return None
    return f"groups of {size} codes do not begin with an int32, and the kernel takes multiples of {CODES_PER_WORD}"


weight_only_linear = own_op(WEIGHT_ONLY_LINEAR, "weight_only_linear")

IMPLEMENTATIONS = (
    OpImplementation(
        op=WEIGHT_ONLY_LINEAR.qualified_name, name="cpu_weight_only_linear", fn=weight_only_linear, condition=why_not
    ),
)
