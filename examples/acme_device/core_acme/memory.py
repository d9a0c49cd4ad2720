"""The memory of the simulated card: the account of what its tapes hold, to the byte, and memory that can sleep."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch
from core.device import MemoryInfo
from torch import Tensor

if TYPE_CHECKING:
    from core.common.graphs.tape import Tape

TOTAL_BYTES = 16 * 2**30
_NOISE = 0xA5


class Account:
    """Counts the memory that live tapes allocated, and that which can sleep; what nobody refers to any more is out.

    All other tensors of a model and its inputs are the host's in this simulation and are not counted, so the account is
    zero before the first capture and again after the last cleanup.
    """

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self._memories: weakref.WeakSet[CardMemory] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._peak_bytes = 0

    def add(self, tape: Tape) -> None:
        """Take a finished tape into the account, without keeping it alive."""
        with self._lock:
            self._tapes.add(tape)
            self._peak_bytes = max(self._peak_bytes, self._used_bytes())

    def add_memory(self, memory: CardMemory) -> None:
        """Count from now on what this memory has mapped."""
        with self._lock:
            self._memories.add(memory)

    def read(self) -> MemoryInfo:
        """Return the bytes that live tapes hold, the card's declared size, and the most held since the last reset."""
        with self._lock:
            used_bytes = self._used_bytes()
            peak_bytes = max(self._peak_bytes, used_bytes)
        return MemoryInfo(used_bytes=used_bytes, total_bytes=TOTAL_BYTES, peak_bytes=peak_bytes)

    def reset_peak(self) -> None:
        """Let the peak start from what is held now."""
        with self._lock:
            self._peak_bytes = self._used_bytes()

    def _used_bytes(self) -> int:
        return sum(tape.num_bytes for tape in self._tapes) + sum(memory.num_bytes for memory in self._memories)


CARD = Account()
"""The one card of this process; all backends allocate on it."""


class CardMemory:
    """A `SleepingMemory` of the simulated card: the account says when it is given back, noise what is lost by that.

    A vendor's own reserves addresses, and maps the card's pages there or takes them away.
    """

    in_host_memory = False

    def __init__(self) -> None:
        self._tensors: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self._asleep = False
        CARD.add_memory(self)

    @property
    def num_bytes(self) -> int:
        """What is mapped at present."""
        return 0 if self._asleep else sum(tensor.nbytes for tensor in self._tensors)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 on the card."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self._tensors.add(tensor)
        return tensor

    def release(self) -> None:
        """Give all pages back; noise takes the place of what they held, so that nobody reads it unnoticed."""
        for tensor in self._tensors:
            tensor.fill_(_NOISE)
        self._asleep = True

    def restore(self) -> None:
        """Map pages again at the same addresses, all or none."""
        needed = sum(tensor.nbytes for tensor in self._tensors)
        if CARD.read().used_bytes + needed > TOTAL_BYTES:
            raise torch.OutOfMemoryError(f"{needed} bytes, and the card has {TOTAL_BYTES}")
        self._asleep = False
