"""The owner of transformers' static cache: one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from core.engine.steps.sequence import Sequence


class CacheOwner:
    """The `SequenceCache` of the static route: the one sequence that holds the cache has all of it."""

    keeps_states = True

    def __init__(self, reset: Callable[[], object]) -> None:
        """reset: empties the cache."""
        self._reset = reset
        self._owner: Sequence | None = None

    def join(self, sequence: Sequence) -> bool:
        """Take the sequence if no other one holds the cache."""
        if self._owner not in (None, sequence):
            return False
        self._owner = sequence
        self._reset()
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return True: the cache has room for the whole context."""
        return self._owner is sequence

    def fits(self, wanted: List[tuple[Sequence, int]], *, without: List[Sequence] = ()) -> bool:
        """Return True: the one sequence has the whole context."""
        return True

    def trim(self, sequence: Sequence) -> None:
        """Do nothing: nobody else could use it."""

    def settle(self, sequence: Sequence) -> None:
        """Do nothing: no other sequence can use what this one has computed."""

    def forget(self) -> None:
        """Empty the cache."""
        self._reset()

    def release(self, sequence: Sequence) -> None:
        """Let the next sequence have the cache, if this one holds it."""
        if self._owner is sequence:
            self._owner = None
