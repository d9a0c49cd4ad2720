"""Kernels as torch ops: `core_cuda::name` with the schema and the fake of the canonical op that it implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp

__all__ = ["NAMESPACE", "kernel_of"]

NAMESPACE = "core_cuda"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def kernel_of(op: CanonicalOp, name: str = "") -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return the decorator that registers a function as `core_cuda::name`, by default under the function's own name.

    The function takes what the canonical op takes, writes what it writes and returns what it returns. It becomes one
    node of a graph, whatever lowers that, and is not looked into.
    """

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        own = name or function.__name__
        # As core declares its own ops, without the Python that torch.library.custom_op puts around each call.
        _LIBRARY.define(own + op.schema.removeprefix(op.name))
        _LIBRARY.impl(own, _on_its_device(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{own}", op.fake, lib=_LIBRARY)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), own).default
        return overload

    return register


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the GPU of its first operand made current, on whose stream Triton launches."""

    def run(first: Tensor, *operands: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *operands, **options)

    return run
