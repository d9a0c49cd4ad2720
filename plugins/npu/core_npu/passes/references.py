"""Gives torch the references of torch_npu's ops as their kernels on the host.

They compute in fp32, in fp64 for fp64 inputs, and round once, where a result is written: a fused op keeps in between
what the ops apart round, as the device's kernels may. torch_npu itself has kernels for the device alone; verification
runs a graph on the host in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import core_npu.passes.norm.reference
import core_npu.passes.rotary.reference  # noqa: F401  # both enter their formulas
from core_npu.passes.reference import FORMULAS

__all__ = ["FORMULAS", "register_references"]


@cache
def register_references() -> torch.library.Library:
    """Make the formulas the ops' kernels on the host, where these are defined and have none; once per process."""
    library = torch.library.Library("npu", "IMPL")
    for name, function in FORMULAS.items():
        is_defined = hasattr(torch.ops.npu, name)
        if is_defined and not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "CPU"):
            library.impl(name, _kernel(function), "CPU")
    return library


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        # An op returns memory of its own and lies there without gaps.
        return tuple(r.clone() for r in results) if isinstance(results, tuple) else results

    return kernel
