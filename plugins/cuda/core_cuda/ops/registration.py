"""Kernels as torch ops: `core_cuda::name` with the schema and the fake of the canonical op that it implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp

NAMESPACE = "core_cuda"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def kernel_of(op: CanonicalOp) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return the decorator that registers a function as the kernel `core_cuda::name` of a canonical op.

    The function gets every argument of the schema by name, defaults filled in, with the GPU of the first one current:
    Triton launches on its stream. It writes what the canonical op writes and returns what it returns. It becomes one
    node of a graph, which no lowering looks into.
    """

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        names = op.positional
        defaults = {a.name: a.default_value for a in op.overload._schema.arguments if a.has_default_value()}

        def run(first: Tensor, *operands: Any, **options: Any) -> Any:
            with torch.cuda.device_of(first):
                return function(**{**defaults, **dict(zip(names, (first, *operands), strict=False)), **options})

        # As core declares its own ops, without the Python that torch.library.custom_op puts around each call.
        _LIBRARY.define(op.schema)
        _LIBRARY.impl(op.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", op.fake, lib=_LIBRARY)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), op.name).default
        return overload

    return register
