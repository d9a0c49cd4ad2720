"""A `torch.accelerator` that answers for the processor, so that the generic device can be opened anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from core.accelerator import memory


@dataclass
class Accelerator:
    """What the stand-in answers; `calls` lists what it was asked to do."""

    type: str = "cpu"
    count: int = 2
    #: Bytes in use, at the peak, reserved; None for an allocator that counts nothing.
    counts: tuple[int, int, int] | None = (64, 128, 256)
    #: None for an allocator that does not tell it.
    total_bytes: int | None = 1 << 30
    calls: list[str] = field(default_factory=list)

    def current_accelerator(self, check_available: bool = False) -> torch.device | None:
        return torch.device(self.type) if self.type else None

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def _count(self, place: int) -> int:
        if self.counts is None:
            raise RuntimeError("Allocator is not a DeviceAllocator.\nfurther lines")
        return self.counts[place]

    def memory_allocated(self, device: torch.device) -> int:
        return self._count(0)

    def max_memory_allocated(self, device: torch.device) -> int:
        return self._count(1)

    def memory_reserved(self, device: torch.device) -> int:
        return self._count(2)

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        if self.total_bytes is None:
            raise NotImplementedError("getMemoryInfo is not implemented")
        return 0, self.total_bytes

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.calls.append("reset")

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def current_stream(self, device: torch.device) -> Any:
        raise RuntimeError("no streams here")


def install(monkeypatch: pytest.MonkeyPatch, *, only: tuple[str, ...] = (), **answers: Any) -> Accelerator:
    """Put a stand-in in the place of `torch.accelerator`'s functions, or only of those named."""
    stand_in = Accelerator(**answers)
    if not only:
        monkeypatch.setattr(memory, "_ACCOUNTS", {})
    for name in only or dir(Accelerator):
        if not name.startswith("_") and callable(getattr(stand_in, name)):
            monkeypatch.setattr(torch.accelerator, name, getattr(stand_in, name), raising=False)
    return stand_in
