"""Host memory that can be given back while its addresses stay: private pages that the kernel may drop."""

from __future__ import annotations

import mmap
import sys
import weakref

import torch
from torch import Tensor

CAN_SLEEP = sys.platform == "linux"
"""Only on Linux does MADV_DONTNEED free private pages at once, and give zeroed pages when they are touched again."""


class HostMemory:
    """A `SleepingMemory` of the processor: each tensor lies in anonymous pages of its own."""

    in_host_memory = True

    def __init__(self) -> None:
        self._pages: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 whose pages become resident when they are touched."""
        try:
            # Private: the kernel would keep the content of shared pages elsewhere.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise torch.OutOfMemoryError(f"no address space for {num_bytes} bytes: {error}") from error
        self._pages.add(pages)
        return torch.frombuffer(pages, dtype=torch.uint8)  # the storage keeps the pages alive

    def release(self) -> None:
        """Drop the pages of all living tensors."""
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Do nothing: the kernel gives a page again when it is touched."""
