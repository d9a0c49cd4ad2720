"""What torch says of its accelerator: its type, how many there are, what they are called.

torch drives one type of accelerator in a process: that of a loaded extension, else what torch was built for. No type is
named here; torch is asked.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch


def offered_type() -> str:
    """Return the type of accelerator that this torch has support for, present or not; "" where it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return "" if accelerator is None else accelerator.type


def knows(name: str) -> bool:
    """Return whether torch has a device type of that name, with or without support for it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of types that it means to give up
            return torch.device(name).index is None
    except RuntimeError:
        return False


def count_devices() -> int:
    """Return how many devices of the offered type torch finds."""
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def product_name(device: torch.device) -> str:
    """Return what the device's module of torch calls the product, or the device itself where it tells nothing.

    Both functions are customary for such a module, and neither is compulsory.
    """
    module = torch.get_device_module(device)
    for ask in ("get_device_name", "get_device_properties"):
        with suppress(Exception):  # whatever fails in such a module, the product has no name
            answer = getattr(module, ask)(device.index)
            name = answer if isinstance(answer, str) else answer.name
            if isinstance(name, str) and name.strip():
                return name.strip()
    return str(device)
