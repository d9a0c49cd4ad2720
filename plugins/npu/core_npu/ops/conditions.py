"""Conditions that the ops share: small functions from a call to why a kernel cannot take it, or None.

They follow the documentation of CANN's kernels for Atlas A2 and A3; none of it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.common.ops.implementation import Condition, OpCall

__all__ = [
    "DTYPES",
    "HALF",
    "all_of",
    "computes_in_fp32",
    "dtypes",
    "int8_codes",
    "keeps_dtype",
    "listed",
    "rank_at_least",
    "same_dtype",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of elementwise kernels and kernels over rows; they compute in fp32."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes of attention and of the kernels that end in a quantisation."""

MAX_RANK = 8
"""The most dimensions that an aclnn kernel takes."""


def all_of(*conditions: Condition) -> Condition:
    """Return the condition that refuses with the first reason that one of these gives."""

    def condition(call: OpCall) -> str | None:
        return next((reason for c in conditions if (reason := c(call)) is not None), None)

    return condition


def dtypes(names: Sequence[str], taken: Sequence[torch.dtype] = DTYPES) -> Condition:
    """Return the condition that the named tensors, where given, are of these dtypes and of at most 8 dimensions."""

    def condition(call: OpCall) -> str | None:
        for name in names:
            tensor = call.args[name]
            if tensor is not None and tensor.dtype not in taken:
                return f"{name} is {tensor.dtype}, and the kernel takes {listed(taken)}"
            if tensor is not None and tensor.dim() > MAX_RANK:
                return f"{name} has {tensor.dim()} dimensions, and the kernel takes {MAX_RANK}"
        return None

    return condition


def same_dtype(first: str, *others: str, wide: bool = False) -> Condition:
    """Return the condition that tensors, where given, have the first one's dtype; wide: or are of float32."""

    def condition(call: OpCall) -> str | None:
        dtype = call.args[first].dtype
        for name in others:
            own = getattr(call.args[name], "dtype", dtype)
            if own != dtype and not (wide and own == torch.float32):
                return f"{name} is {own} and {first} {dtype}, and the kernel takes one dtype"
        return None

    return condition


def keeps_dtype(name: str) -> Condition:
    """Return the condition that the result has the dtype of the named tensor."""

    def condition(call: OpCall) -> str | None:
        asked, own = call.args["out_dtype"], call.args[name].dtype
        return None if asked in (None, own) else f"out_dtype is {asked}, and the kernel's result has {name}'s {own}"

    return condition


def computes_in_fp32(*tensors: str, asked: str = "compute_dtype") -> Condition:
    """Return the condition of a kernel that computes in fp32 whatever is asked for.

    tensors: names of the tensors that the op casts to compute_dtype first. If that is their own dtype, computing wider
    is allowed. If they are wider, the op's cast would drop digits that the kernel keeps.
    """

    def condition(call: OpCall) -> str | None:
        compute = call.args.get(asked)
        if compute in (None, torch.float32):
            return None
        for name in tensors:
            own = call.args[name].dtype
            if own != compute:
                return f"{asked} is {compute} and {name} {own}, and the kernel computes in torch.float32"
        return None

    return condition


def rank_at_least(name: str, rank: int) -> Condition:
    """Return the condition that the named tensor has so many dimensions."""

    def condition(call: OpCall) -> str | None:
        own = call.args[name].dim()
        return None if own >= rank else f"{name} has rank {own}, and the kernel takes {rank} or more"

    return condition


def int8_codes(call: OpCall) -> str | None:
    """Refuse formats of code but int8: kernels for Atlas A2 and A3 make no other of eight bits."""
    dtype = call.args["dtype"]
    return None if dtype == torch.int8 else f"dtype is {dtype}, and the kernel makes codes of torch.int8"


def listed(dtypes: Sequence[torch.dtype]) -> str:
    """Return dtypes as a reason writes them."""
    return ", ".join(map(str, dtypes))
