"""The memory of an accelerator: what torch counts of it, and where it counts nothing, what captured graphs hold."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from core.device import MemoryInfo
from core.errors import one_line


class AcceleratorMemory:
    """Reads the memory of one device; which numbers torch has is found out once, when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Reentrant: an owner may be collected, which calls _drop, while this thread holds the lock.
        self._lock = threading.RLock()
        self._held_bytes = self._peak_bytes = 0
        #: Why torch's counters can't be read; "" where they can.
        self.uncounted = _problem(lambda: torch.accelerator.memory_allocated(device))
        #: Why the total is that of the host's memory; "" where the device tells its own.
        self.untold = _problem(lambda: MemoryInfo.from_torch(device))
        #: None where torch is asked each time.
        self._total_bytes: int | None = None
        if self.untold:
            self._total_bytes, self.untold = self._find_total()

    def read(self) -> MemoryInfo:
        """Return torch's counters; where it has none, what captured graphs hold."""
        if self._total_bytes is None:
            return MemoryInfo.from_torch(self._device)
        if self.uncounted:
            with self._lock:
                return MemoryInfo(
                    used_bytes=self._held_bytes, total_bytes=self._total_bytes, peak_bytes=self._peak_bytes
                )
        counts = torch.accelerator
        return MemoryInfo(
            used_bytes=counts.memory_allocated(self._device),
            total_bytes=self._total_bytes,
            peak_bytes=counts.max_memory_allocated(self._device),
            held_bytes=counts.memory_reserved(self._device),
        )

    def reset_peak(self) -> None:
        """Let the peak start from what is in use now."""
        if not self.uncounted:
            torch.accelerator.reset_peak_memory_stats(self._device)
            return
        with self._lock:
            self._peak_bytes = self._held_bytes

    def hold(self, owner: object, num_bytes: int) -> None:
        """Count these bytes until the owner is gone, where torch counts nothing."""
        if self.uncounted:
            weakref.finalize(owner, self._drop, num_bytes).atexit = False
            with self._lock:
                self._held_bytes += num_bytes
                self._peak_bytes = max(self._peak_bytes, self._held_bytes)

    def _drop(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes -= num_bytes

    def _find_total(self) -> tuple[int, str]:
        """Return the device's memory as its module of torch tells it, else the host's, with the reason."""
        module, index = torch.get_device_module(self._device), self._device.index
        found: int | None = None
        with suppress(AttributeError, RuntimeError, TypeError):
            found = int(module.get_device_properties(index).total_memory)
        with suppress(AttributeError, RuntimeError, TypeError):
            found = int(module.mem_get_info(index)[1])
        if found:
            return found, ""
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host_bytes, f"the device does not tell how much memory it has ({self.untold}): the host's is taken"


_ACCOUNTS: dict[torch.device, AcceleratorMemory] = {}


def memory_of(device: torch.device) -> AcceleratorMemory:
    """Return the one account of a device in this process, which all who open it share."""
    if device not in _ACCOUNTS:
        _ACCOUNTS[device] = AcceleratorMemory(device)
    return _ACCOUNTS[device]


def _problem(read: Callable[[], object]) -> str:
    """Return why a counter can't be read, "" where it can."""
    try:
        read()
    except (AttributeError, RuntimeError) as error:  # also NotImplementedError
        return one_line(str(error)) or type(error).__name__
    return ""
