"""Kernels as torch ops: `core_cuda::name` with the schema and the fake of the canonical op that it implements, or,
where a pass of the plugin makes the calls, of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import Fp64Mode
from core.common.ops.declaration import CanonicalOp
from core_cuda.ops import launching

NAMESPACE = "core_cuda"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OP_OF: dict[torch._ops.OpOverload, str] = {}
"""The canonical op, as `core::attention`, of each kernel that was registered."""
CODE_OF: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""What torch calls for each kernel, with the arguments of its schema: it launches what the kernel consists of."""


def own_kernel(
    schema: str, fake: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return the decorator that registers a function as a kernel `core_cuda::name` that implements no canonical op.

    schema: torch's, without a namespace. A pass of the plugin brings such a kernel into graphs. fake: returns tensors
    of the results' shapes, dtypes and strides. The function gets the call's arguments as they stand; the GPU of the
    first one is current.

    reference: computes the same by torch's ops. It runs where the first tensor lies in the host's memory, as in the
    fp64 run by which a later pass is judged, and computes in fp64 where a tensor is of that.
    """

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        def run(first: Tensor, *operands: Any, **options: Any) -> Any:
            if first.device.type == "cpu" and not launching.takes_host_tensors():
                is_wide = any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in (first, *operands))
                with Fp64Mode() if is_wide else nullcontext():
                    return reference(first, *operands, **options)
            with torch.cuda.device_of(first):
                return function(first, *operands, **options)

        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    return register


def kernel_of(op: CanonicalOp, variant: str = "") -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return the decorator that registers a function as the kernel `core_cuda::name` of a canonical op.

    variant: ends the name, where an op has several kernels.

    The function gets every argument of the schema by name, defaults filled in. The GPU of the first argument is
    current, since Triton launches on its stream. The function writes and returns what the canonical op does. In a graph
    it is one node, which no lowering decomposes.
    """

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        names = op.positional
        defaults = {a.name: a.default_value for a in op.overload._schema.arguments if a.has_default_value()}

        def run(first: Tensor, *operands: Any, **options: Any) -> Any:
            with torch.cuda.device_of(first):
                return function(**{**defaults, **dict(zip(names, (first, *operands), strict=False)), **options})

        # Define the op as core declares its own, without the Python wrapper of torch.library.custom_op around each
        # call.
        name = f"{op.name}_{variant}" if variant else op.name
        _LIBRARY.define(op.schema.replace(op.name, name, 1))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=_LIBRARY)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        OP_OF[overload] = op.qualified_name
        CODE_OF[overload] = run
        return overload

    return register
