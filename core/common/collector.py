"""The garbage collector kept from running: `paused` for speed, `frozen` so that nothing is freed at a wrong time.

The collector is the process's: of blocks that overlap in several threads the first to begin and the last to end count.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Shared:
    """A state of the process that holds while any block wants it.

    enter: sets the state and returns what was before. leave: is given that, and restores it.
    """

    def __init__(self, enter: Callable[[], bool], leave: Callable[[bool], None]) -> None:
        self._enter, self._leave = enter, leave
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._before = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the state for the block."""
        with self._lock:
            if self._num_blocks == 0:
                self._before = self._enter()
            self._num_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                if self._num_blocks == 0:
                    self._leave(self._before)


def _disable() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _enable_again(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()


_FEWEST_FROZEN = 10_000
"""Frozen objects from which on somebody is taken to have frozen them: `gc.freeze` takes in all there are, more than
100,000 in a process that has torch."""


def is_frozen() -> bool:
    """Return whether somebody has frozen the process's objects.

    Some hundred frozen objects prove nothing: from Python 3.12 on, a collection freezes immortal ones by itself. The
    others are not counted: `gc.get_objects` takes hold of tuples that another thread is still building, and there the
    building then fails with a `SystemError`.
    """
    return gc.get_freeze_count() > _FEWEST_FROZEN


def _freeze() -> bool:
    was_frozen = is_frozen()
    # Nothing is added to what the caller has frozen: the two could not be thawed apart, and circles that die later
    # would never be freed.
    if not was_frozen:
        gc.freeze()
    return was_frozen


def _unfreeze(was_frozen: bool) -> None:
    if not was_frozen:  # else unfreezing would take in what the caller froze
        gc.unfreeze()


_OFF = _Shared(_disable, _enable_again)
_FROZEN = _Shared(_freeze, _unfreeze)


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from walking the whole process in the middle of work that makes many small objects."""
    with _OFF.held():
        yield


@contextmanager
def frozen() -> Iterator[None]:
    """Collect, then keep all that is alive out of the collector's sight and the collector from running.

    For the time of a capture: a finaliser that touches the device would end up in the graph, and a collection that
    someone asks for inside finds only what is new (in a process that has frozen its objects itself: what is newer than
    that freeze).
    """
    gc.collect()
    with _OFF.held(), _FROZEN.held():
        yield
