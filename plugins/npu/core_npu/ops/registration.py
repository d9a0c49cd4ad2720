"""Ops whose Python reads lengths on the host or names communicators: `core_npu::name`, one node of a graph that nothing
traces into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from core.common.ops.declaration import CanonicalOp

__all__ = ["NAMESPACE", "kernel_of", "own_op"]

NAMESPACE = "core_npu"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def kernel_of(op: CanonicalOp) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return the decorator that registers a function as `core_npu::name`, with schema and fake of a canonical op.

    The function must take, write and return what the op does.
    """
    return own_op(op.schema, op.fake)


def own_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return the decorator that registers a function as `core_npu::name`, with a schema of torch's and a fake."""

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        # Without the Python that torch.library.custom_op puts around each call.
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    return register
