"""Blocks in which the garbage collector does not run: `paused` for speed, `frozen` so that nothing is freed in a
capture.

A process has one collector. Where blocks of several threads overlap, it stops at the first start and runs again after
the last end.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Shared:
    """A process-wide state that lasts while at least one block holds it.

    enter: sets the state and returns the previous one. leave: takes the previous state and restores it.
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
"""With at least this many frozen objects, somebody has called `gc.freeze`. It freezes every live object, more than
100,000 in a process with torch."""


def is_frozen() -> bool:
    """Return whether somebody has frozen the process's objects.

    Some hundred frozen objects prove nothing: from Python 3.12 on, a collection freezes immortal ones by itself.
    Objects that are not frozen can't be counted: `gc.get_objects` takes references to tuples that another thread is
    still building, which makes that thread fail with a `SystemError`.
    """
    return gc.get_freeze_count() > _FEWEST_FROZEN


def _freeze() -> bool:
    was_frozen = is_frozen()
    # Freeze nothing on top of what the caller froze: `gc.unfreeze` thaws both together, so cycles that die later would
    # never be freed.
    if not was_frozen:
        gc.freeze()
    return was_frozen


def _unfreeze(was_frozen: bool) -> None:
    if not was_frozen:  # else unfreezing would also thaw what the caller froze
        gc.unfreeze()


_OFF = _Shared(_disable, _enable_again)
_FROZEN = _Shared(_freeze, _unfreeze)


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from walking the whole process in the middle of work that makes many small objects."""
    with _OFF.held():
        yield


_own = False


def own_process(*, own: bool) -> None:
    """Say whether this process is a command's own: started by the command line, with no caller in Python."""
    global _own
    _own = own


def is_own_process() -> bool:
    """Return what `own_process` was last told; False at first."""
    return _own


@contextmanager
def importing() -> Iterator[None]:
    """Keep the collector from walking modules while they are imported and, in a command's own process, ever after.

    Modules make most of a process's objects, and live on. Walking them takes 0.3 s each time: while the model is
    loaded, at captures, at the end.
    """
    with paused():
        yield
        if _own:
            gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Collect, then keep all that is alive out of the collector's sight and the collector from running.

    For use around a capture: a finaliser that touches the device would end up in the graph. A collection that code
    inside asks for finds only objects made since (since the caller's own freeze, if the caller froze).
    """
    gc.collect()
    with _OFF.held(), _FROZEN.held():
        yield
