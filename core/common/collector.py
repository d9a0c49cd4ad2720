"""The garbage collector kept from running: `paused` for speed, `frozen` so that nothing is freed at a wrong time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from walking the whole process in the middle of work that makes many small objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Collect, then keep all that is alive out of the collector's sight and the collector from running.

    For the time of a capture: a finaliser that touches the device would end up in the graph, and a collection that
    someone asks for inside finds only what is new.
    """
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        with paused():
            yield
    finally:
        if not was_frozen:  # else unfreezing would take in what the caller froze
            gc.unfreeze()
