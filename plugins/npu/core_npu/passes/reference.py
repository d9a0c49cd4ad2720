"""The registry of references of torch_npu's ops, and the norm that most of them begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMULAS", "formula", "normed", "require", "wide"]

_KNOWN: dict[str, Callable[..., Any]] = {}
FORMULAS: Mapping[str, Callable[..., Any]] = MappingProxyType(_KNOWN)
"""By op, a function that computes it on any floating dtype and on fake tensors."""


def formula(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function under its own name, which is the op's."""
    _KNOWN[function.__name__] = function
    return function


def require(holds: bool) -> None:
    """Raise `NotImplementedError` for arguments that no pass and no model in the tests gives."""
    if not holds:
        raise NotImplementedError("the reference of an op of torch_npu for these arguments; it has the forms of passes")


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def normed(x: Tensor, gamma: Tensor, epsilon: float, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the norm of x without rounding, and its factor 1 / rms."""
    rstd = torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + epsilon)
    y = wide(x) * rstd * wide(gamma)
    return y if beta is None else y + wide(beta), rstd
