"""SIGTERM as an interrupt: a command that has measured for minutes reports what it has, as after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from core.engine.parallel.rank import is_launched

EXIT_TERMINATED = 143
"""The exit code of a command that SIGTERM has ended."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Have a first SIGTERM raise `Terminated` in the main thread; a second one ends the process as it always does.

    Nothing changes in a process that a launcher started, which is ended by that, nor outside of the main thread.
    """
    if is_launched() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminated(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
