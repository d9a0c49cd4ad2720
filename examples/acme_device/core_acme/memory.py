"""The allocator account of the simulated card: what its tapes hold, to the byte."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from core.device import MemoryInfo

if TYPE_CHECKING:
    from core.common.graphs.tape import Tape

TOTAL_BYTES = 16 * 2**30


class Account:
    """Counts the memory that live tapes allocated; a tape leaves the account when the last reference to it goes.

    Tensors of a model and its inputs are the host's in this simulation and are not counted, so the account is zero
    before the first capture and again after the last cleanup.
    """

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._peak_bytes = 0

    def add(self, tape: Tape) -> None:
        """Take a finished tape into the account, without keeping it alive."""
        with self._lock:
            self._tapes.add(tape)
            self._peak_bytes = max(self._peak_bytes, self._used_bytes())

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
        return sum(tape.num_bytes for tape in self._tapes)


CARD = Account()
"""The one card of this process; all backends allocate on it."""
