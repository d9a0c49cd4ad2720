"""Faults of the opened device: each takes the function that opens it and returns another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from core.device import DeviceParts
from core.errors import DeviceUnavailableError
from core.hookspecs import OpenContext
from torch import Tensor

from core_acme.faults import graphs

Opener = Callable[[OpenContext], DeviceParts]
Fault = Callable[[Opener], Opener]
_OVERRIDES: list[torch.library.Library] = []  # a library that is let go of takes its kernels back


def _changing(change: Callable[[DeviceParts], dict[str, Any]]) -> Fault:
    """Make a function the fault of its name: it says which parts of the opened device are others."""

    def fault(open_device: Opener) -> Opener:
        def opened(context: OpenContext) -> DeviceParts:
            parts = open_device(context)
            return replace(parts, **change(parts))

        return opened

    return fault


def probe_lies(open_device: Opener) -> Opener:
    """Find out that the second card is not there; the honest function believes the probe."""

    def opened(context: OpenContext) -> DeviceParts:
        if context.index > 0:
            raise DeviceUnavailableError(
                f"device {context.plugin.device!r}, index {context.index}",
                found="the driver knows one card",
                remedy="choose index 0",
            )
        return open_device(context)

    return opened


@_changing
def dtypes_lie(parts: DeviceParts) -> dict[str, Any]:
    """Declare a dtype that torch can store on this device, and not add."""
    dtypes = parts.capabilities.dtypes | {torch.float8_e4m3fn}
    return {"capabilities": replace(parts.capabilities, dtypes=dtypes)}


@_changing
def memory_zero(parts: DeviceParts) -> dict[str, Any]:
    """Leave the used and the peak memory out of the account."""
    return {"memory": lambda: replace(parts.memory(), used_bytes=0, peak_bytes=0)}


def error_vague(open_device: Opener) -> Opener:
    """Index the list of cards without looking at its length."""

    def opened(context: OpenContext) -> DeviceParts:
        [context.plugin][context.index]
        return open_device(context)

    return opened


@_changing
def late_landing(parts: DeviceParts) -> dict[str, Any]:
    """Let results land at a synchronisation; the other half is the graph backend's."""
    return {"synchronize": graphs.land}


def _replacing(op: str) -> Callable[[Callable[..., Tensor]], Fault]:
    """Make a function the fault of its name: until the process ends it is the processor's kernel of an operator."""

    def made(kernel: Callable[..., Tensor]) -> Fault:
        def fault(open_device: Opener) -> Opener:
            if not _OVERRIDES:
                library = torch.library.Library("aten", "IMPL")
                library.impl(op, kernel, "CPU", allow_override=True)
                _OVERRIDES.append(library)
            return open_device

        return fault

    return made


@_replacing("rsub.Scalar")
def torch_elsewhere(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    """Fall back to another device, and stay there."""
    return x.mul(-alpha).add(other).to("meta")


@_replacing("tril")
def torch_strides(x: Tensor, diagonal: int = 0) -> Tensor:
    """Leave the result as a kernel that works column by column makes it."""
    kept = torch.ones(x.shape[-2:], dtype=torch.bool).cumsum(-1) <= torch.arange(x.shape[-2])[:, None] + diagonal + 1
    return torch.where(kept, x, torch.zeros((), dtype=x.dtype)).mT.contiguous().mT


@_replacing("gelu")
def torch_gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute one form for both."""
    wide = x if x.dtype == torch.float64 else x.float()
    cubed = wide + 0.044715 * wide * wide * wide
    return (0.5 * wide * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubed))).to(x.dtype)
