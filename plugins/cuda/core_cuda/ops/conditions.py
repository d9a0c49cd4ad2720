"""Conditions that kernels over rows share: small functions from a call to why a kernel cannot take it, or None."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.common.ops.implementation import Condition, OpCall
from core_cuda.ops import launching

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that kernels over rows read and write; they compute in fp32."""

CODES = (torch.float8_e4m3fn, torch.int8)
"""Dtypes to which they quantise."""

_CODE_CAPABILITY = {torch.float8_e4m3fn: (8, 9)}
"""The least compute capability with instructions for codes of a dtype, where that is more than the plugin needs."""


def all_of(*conditions: Condition) -> Condition:
    """Return the condition that refuses with the first reason that one of these gives."""

    def condition(call: OpCall) -> str | None:
        return next((reason for c in conditions if (reason := c(call)) is not None), None)

    return condition


def no_codes(dtype: torch.dtype) -> str | None:
    """Return why the current GPU has no codes of a dtype, or None where it has, or where they are no codes."""
    needed, found = _CODE_CAPABILITY.get(dtype, (0, 0)), launching.capability()
    if found >= needed:
        return None
    return f"codes of {dtype} need compute capability {_version(needed)}, and this GPU has {_version(found)}"


def dtypes(call: OpCall) -> str | None:
    """Refuse floating dtypes beyond `DTYPES`, of tensors and of arguments that name one; codes may be of any that the
    GPU has."""
    for name, value in call.args.items():
        dtype = value.dtype if isinstance(value, Tensor) else value
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype not in (*DTYPES, *CODES):
            return f"{name} is {dtype}, and the kernel takes {_listed(DTYPES)}"
        if isinstance(dtype, torch.dtype) and (reason := no_codes(dtype)):
            return reason
    return None


def computes_in_fp32(*tensors: str) -> Condition:
    """Return the condition of a kernel that computes in fp32 whatever is asked for.

    tensors: names of the tensors that the op casts to compute_dtype first. If that is their own dtype, computing wider
    is allowed. If they are wider, the op's cast would drop digits that the kernel keeps.
    """

    def condition(call: OpCall) -> str | None:
        compute = call.args.get("compute_dtype")
        if compute in (None, torch.float32):
            return None
        for name in tensors:
            if call.args[name].dtype != compute:
                own = call.args[name].dtype
                return f"compute_dtype is {compute} and {name} {own}, and the kernel computes in torch.float32 or wider"
        return None

    return condition


def code_dtype(call: OpCall) -> str | None:
    """Refuse formats of code that the kernels do not make."""
    dtype = call.args["dtype"]
    if dtype not in CODES:
        return f"dtype is {dtype}, and the kernel makes codes of {_listed(CODES)}"
    return no_codes(dtype)


def code_regions(call: OpCall) -> str | None:
    """Refuse scales that a kernel cannot make, or take, in the launch that makes the values."""
    granularity, given, size = (call.args[name] for name in ("granularity", "scale", "group_size"))
    if granularity == "tensor":
        return None if given is not None else "one scale of all rows is to be made, and no program sees all of them"
    if given is not None:
        return f"a scale is given by {granularity}, and the kernel takes one for the whole tensor"
    if granularity == "group" and size & (size - 1):
        return f"group_size is {size}, and the kernel takes powers of two"
    return None


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))
