"""The fp64 reference: a function run on the CPU in fp64, on inputs that keep the rounding they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.common.verification.execution import Copies, ReferenceMode


def own(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with tensors of their own, for a function that may write into them; sharing is kept."""
    copies = Copies()
    return {name: copies.of(value) for name, value in arguments.items()}


def on_host(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with tensors of their own in the host's memory; dtypes, strides and sharing are kept."""
    copies = _HostCopies()
    return {name: copies.of(value) for name, value in arguments.items()}


def exact(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the function's result in fp64 on the CPU, and the arguments it ran on, with what it wrote into them."""
    copies = Copies(fp64=True)
    wide = {name: copies.of(value) for name, value in arguments.items()}
    with torch.no_grad(), ReferenceMode():
        return function(**wide), wide


def to(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return arguments with their tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


@dataclass(slots=True)
class _HostCopies:
    """Copies whole storages, so that views of one stay views of one."""

    bases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = (value.untyped_storage()._cdata, value.dtype)
        if key not in self.bases:
            size = value.untyped_storage().nbytes() // value.element_size()
            self.bases[key] = value.detach().as_strided((size,), (1,), 0).to("cpu", copy=True)
        return self.bases[key].as_strided(value.shape, value.stride(), value.storage_offset())
