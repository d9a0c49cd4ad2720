"""`core::rms_norm` by intel-extension-for-pytorch's kernel.

Its `add_rmsnorm` is no implementation of `core::add_rms_norm`: it normalises the sum before it is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.norm.norms import RMS_NORM
from core_cpu.ipex import presence

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_norm(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::rms_norm`, or None; imports the library for one that it can."""
    if missing := presence.why_not():
        return missing
    args = call.args
    x, weight = args["x"], args["weight"]
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, _DTYPES))}"
    if weight is None:
        return "it has no weight, and the kernel takes one"
    if args["offset"]:
        return f"its weight is offset by {args['offset']}, and the kernel adds nothing"
    if args["compute_dtype"] not in (None, torch.float32) or args["normed_dtype"] not in (None, torch.float32):
        return "it rounds before the weight, and the kernel computes in torch.float32 up to the end"
    if args["out_dtype"] not in (None, x.dtype):
        return f"the result is {args['out_dtype']}, and the kernel gives {x.dtype}"
    if args["weight_dtype"] not in (None, weight.dtype, torch.float32):
        return f"the weight is rounded to {args['weight_dtype']}, and the kernel takes it as it is"
    presence.load()
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float, **_: Any) -> Tensor:
    """Return what `core::rms_norm` returns, for calls that `why_not_norm` lets pass."""
    normed: Tensor = torch.ops.torch_ipex.rmsnorm(x.contiguous(), weight, eps)
    return normed if x.is_contiguous() else torch.empty_like(x).copy_(normed)


IMPLEMENTATIONS = (
    OpImplementation(
        op=RMS_NORM.qualified_name,
        name="ipex_rms_norm",
        fn=rms_norm,
        condition=why_not_norm,
        missing=presence.why_not(),
    ),
)
