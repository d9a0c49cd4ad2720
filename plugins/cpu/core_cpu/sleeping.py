"""Host memory that can be given back while its addresses stay: private pages, large ones, that the kernel may drop."""

from __future__ import annotations

import mmap
import sys
import weakref
from contextlib import suppress

import torch
from torch import Tensor

CAN_SLEEP = sys.platform == "linux"
"""Only on Linux does MADV_DONTNEED free private pages at once, and give zeroed pages when they are touched again."""
_LARGE_PAGE = 2**21
_CHUNK = 2**28
"""Bytes of address space that small tensors share; pages take no memory before they are touched."""
_ALIGNMENT = 64


class HostMemory:
    """A `SleepingMemory` of the processor: tensors lie one behind the other in anonymous pages.

    Large pages, where the system has them: products of few rows read weights as fast as memory gives them, and with
    small pages the processor spends up to a fifth of that time on looking addresses up.
    """

    in_host_memory = True

    def __init__(self) -> None:
        self._chunks: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        # The last of them has room from `_end` on.
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._end = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 whose pages become resident when they are touched."""
        chunk = None if self._chunk is None else self._chunk()
        if chunk is None or self._end + num_bytes > len(chunk):
            chunk, self._end = self._new_chunk(num_bytes), 0
            self._chunk = weakref.ref(chunk)
        start = self._end
        self._end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(chunk, dtype=torch.uint8, offset=start, count=num_bytes)  # the storage keeps the chunk

    def release(self) -> None:
        """Drop the pages of all living tensors."""
        for chunk in self._chunks:
            chunk.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Do nothing: the kernel gives a page again when it is touched."""

    def _new_chunk(self, num_bytes: int) -> mmap.mmap:
        size = max(-(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE, _CHUNK)
        try:
            # Private: the kernel would keep the content of shared pages elsewhere.
            chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise torch.OutOfMemoryError(f"no address space for {num_bytes} bytes: {error}") from error
        with suppress(OSError):  # a kernel may be built without large pages
            chunk.madvise(mmap.MADV_HUGEPAGE)
        self._chunks.add(chunk)
        return chunk
