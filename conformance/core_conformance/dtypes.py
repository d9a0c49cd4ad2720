"""The floating dtypes that cases compute in, how ids and reports name them, and which of them a device declares."""

from __future__ import annotations

import torch

from core.device import Device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""fp32 first: half precision alone hides a wrong eps."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's short name of a dtype."""
    return str(dtype).removeprefix("torch.")


def declared_dtypes(device: Device) -> list[torch.dtype]:
    """Return those of `DTYPES` that the device declares."""
    return [dtype for dtype in DTYPES if dtype in device.capabilities.dtypes]


def working_dtype(device: Device) -> torch.dtype:
    """Return the dtype of cases that need only one: the widest of the usual ones that the device declares."""
    return next(iter(declared_dtypes(device)), torch.float32)


def refused_dtype(device: Device, dtype: torch.dtype) -> str:
    """Return why a device need not compute in a dtype, by its own declaration; "" where it does."""
    if dtype in device.capabilities.dtypes:
        return ""
    return f"the device declares no arithmetic in {dtype_name(dtype)}"
