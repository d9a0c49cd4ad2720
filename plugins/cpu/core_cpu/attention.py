"""`core::attention` by the extension's kernel: caches of fp32, bf16 and fp16, one dtype for all, no mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.implementation import OpCall, OpImplementation
from core_cpu import extension

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARY = torch.library.Library("core_cpu", "DEF")


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
    return extension.load() or None


def _unloaded(*args: Any, **kwargs: Any) -> Tensor:
    """Run a call in a process that has not asked `why_not`, as one that reads its graphs from the compile cache.

    Loaded, the extension has the op's kernel for the processor, which goes before this.
    """
    if extension.load():
        return ATTENTION.reference(*args, **kwargs)  # type: ignore[no-any-return]  # of any signature
    return attention(*args, **kwargs)  # type: ignore[no-any-return]  # torch.ops is untyped


# As core declares its own ops: the schema and the fake are those of the canonical op.
_LIBRARY.define(ATTENTION.schema)
_LIBRARY.impl(ATTENTION.name, _unloaded, "CompositeExplicitAutograd")
torch.library.register_fake(f"core_cpu::{ATTENTION.name}", ATTENTION.fake, lib=_LIBRARY)
attention: torch._ops.OpOverload = torch.ops.core_cpu.attention.default

IMPLEMENTATIONS = (
    OpImplementation(op=ATTENTION.qualified_name, name="cpu_attention", fn=attention, condition=why_not),
)
