"""Faults of the opened device: each takes the function that opens it and returns another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from core.device import DeviceParts, MemoryInfo
from core.errors import DeviceUnavailableError
from core.hookspecs import OpenContext
from torch import Tensor

from core_acme.faults import graphs

Opener = Callable[[OpenContext], DeviceParts]
_OVERRIDES: list[torch.library.Library] = []  # a library that is let go of takes its kernels back


def _changed(open_device: Opener, change: Callable[[DeviceParts], dict[str, Any]]) -> Opener:
    def opened(context: OpenContext) -> DeviceParts:
        parts = open_device(context)
        return replace(parts, **change(parts))

    return opened


def probe_lies(open_device: Opener) -> Opener:
    """Find out that the second card is not there; the honest function believes the probe."""

    def opened(context: OpenContext) -> DeviceParts:
        parts = open_device(context)
        if context.index > 0:
            raise DeviceUnavailableError(
                f"device {context.plugin.device!r}, index {context.index}",
                found="the driver knows one card",
                remedy="choose index 0",
            )
        return parts

    return opened


def dtypes_lie(open_device: Opener) -> Opener:
    """Declare a dtype that torch can store on this device, and not add."""
    return _changed(
        open_device,
        lambda parts: {
            "capabilities": replace(
                parts.capabilities, dtypes=parts.capabilities.dtypes | frozenset({torch.float8_e4m3fn})
            )
        },
    )


def memory_zero(open_device: Opener) -> Opener:
    """Leave the used and the peak memory out of the account."""

    def read(parts: DeviceParts) -> MemoryInfo:
        return replace(parts.memory(), used_bytes=0, peak_bytes=0)

    return _changed(open_device, lambda parts: {"memory": lambda: read(parts)})


def error_vague(open_device: Opener) -> Opener:
    """Index the list of cards without looking at its length."""

    def opened(context: OpenContext) -> DeviceParts:
        [context.plugin][context.index]
        return open_device(context)

    return opened


def late_landing(open_device: Opener) -> Opener:
    """Let results land at a synchronisation; the other half is the graph backend's."""
    return _changed(open_device, lambda parts: {"synchronize": graphs.land})


def torch_gelu(open_device: Opener) -> Opener:
    """Replace the processor's gelu for the rest of the process."""
    if not _OVERRIDES:
        library = torch.library.Library("aten", "IMPL")
        library.impl("gelu", _gelu, "CPU", allow_override=True)
        _OVERRIDES.append(library)
    return open_device


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    cubed = wide + 0.044715 * wide * wide * wide
    return (0.5 * wide * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubed))).to(x.dtype)
