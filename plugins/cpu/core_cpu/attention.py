"""`core::attention` by the extension's kernel: caches of fp32, bf16 and fp16, one dtype for all, no mask."""

from __future__ import annotations

import torch

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.implementation import OpCall, OpImplementation
from core_cpu import extension
from core_cpu.own_ops import own_op

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::attention`, or None; builds the extension for one that it can.

    call: as it stands in the graph.
    """
    args = call.args
    if args["mask"] is not None:
        return "it has a mask, and the kernel takes none"
    dtype = args["query"].dtype
    if dtype not in _DTYPES:
        return f"query is {dtype}, and the kernel takes {', '.join(map(str, _DTYPES))}"
    for name in ("key", "value", "key_cache", "value_cache"):
        if args[name].dtype != dtype:
            return f"{name} is {args[name].dtype} and query {dtype}, and the kernel takes one dtype"
    if args["sinks"] is not None and args["sinks"].dtype == torch.float64:
        return "sinks are torch.float64, and the kernel computes in torch.float32"
    for name in ("key_cache", "value_cache"):
        if args[name].stride(3) != 1:
            strides = tuple(args[name].stride())
            return f"{name} has strides {strides}, and the kernel takes the features of a head in one run of memory"
    return extension.load("attention") or None


attention = own_op(ATTENTION, "attention")
attention_alike = own_op(ATTENTION, "attention", "_alike")

IMPLEMENTATIONS = (
    OpImplementation(op=ATTENTION.qualified_name, name="cpu_attention", fn=attention, condition=why_not),
    OpImplementation(
        op=ATTENTION.qualified_name,
        name="cpu_attention_alike",
        fn=attention_alike,
        condition=why_not,
        batch_invariant=True,
        on_request=True,
    ),
)
