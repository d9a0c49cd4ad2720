"""Claims the name of a device that ships with `core`."""

from __future__ import annotations

import torch

from core.device import Capabilities, DeviceParts, MemoryInfo
from core.hookspecs import hookimpl


@hookimpl
def core_open_device() -> DeviceParts:
    """Open a device that does nothing."""
    return DeviceParts(
        torch_device=torch.device("cpu"),
        capabilities=Capabilities(device_name="Impostor", dtypes=frozenset({torch.float32})),
        memory=lambda: MemoryInfo(used_bytes=0, total_bytes=0, peak_bytes=0),
    )
