"""What a command does to its process because nobody else uses it; called from Python, `main` does none of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from core.common.collector import paused

_own = False


def begin(*, own: bool) -> None:
    """Say whether the process is the command's own: it was started by the command line, not by a call of `main`."""
    global _own
    _own = own


@contextmanager
def importing() -> Iterator[None]:
    """Keep the collector from walking modules while they are imported and, in an own process, ever after.

    Modules make most of a process's objects, and live on. Walking them takes 0.3 s each time, at the start, at captures
    and at the end.
    """
    with paused():
        yield
        if _own:
            gc.freeze()
