"""Whose turn it is to use a program's static memory: one call at a time, and another is refused or waits."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Literal

from core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from core.device import Device

Threads = Literal["refuse", "serialize"]


class Turns:
    """Gives out the turns of one program. Whoever got one by `take` or `take_part` ends it by `leave`."""

    def __init__(self, threads: Threads, device: Device) -> None:
        """threads: as in `CompileOptions`."""
        self._lock = Lock()
        self._device = device
        #: The thread that has a turn or had the last one, and whether it has; known only where calls wait.
        self._thread: Thread | None = None
        self._taken = False
        self.waits = threads == "serialize"
        # Where calls are refused, these are the lock's own methods: a call pays for nothing else.
        #: Begins a whole call; called with False. Returns whether there was a turn.
        self.take: Callable[[bool], bool] = self._wait if self.waits else self._lock.acquire
        #: Begins the use of buffers that the caller writes or reads outside of a turn.
        self.take_part: Callable[[bool], bool] = _never if self.waits else self._lock.acquire
        self.leave: Callable[[], None] = self._end if self.waits else self._lock.release
        self._own = self.take, self.take_part
        self._held = ""

    def hold(self, reason: str) -> None:
        """Give no turn but `anyway` from now on, for this reason; "" gives them again."""
        self._held = reason
        self.take, self.take_part = (_never, _never) if reason else self._own

    @contextmanager
    def anyway(self) -> Iterator[None]:
        """Take a whole turn, also where turns are held; raise `UsageError` where there is none."""
        if not self._own[0](False):
            raise self.refused()
        try:
            yield
        finally:
            self.leave()

    def refused(self) -> UsageError:
        """Return the error for a call that got no turn."""
        if self._held:
            return UsageError("calling a program", found=self._held, remedy="load_weights with all of the weights")
        asked = "calling a program while another call of it runs"
        remedy = "call it from one thread at a time, compile one program for each, or "
        if self.waits:
            found = "this call comes from inside the other one, so it would wait for itself"
            return UsageError(asked, found=found, remedy="compile a program of its own for the inner call")
        return UsageError(
            asked,
            found="calls of one program share its static buffers: both would compute with each other's inputs",
            remedy=f'{remedy}let calls wait and return copies: options=core.CompileOptions(threads="serialize")',
        )

    def refused_part(self) -> UsageError:
        """Return the error for `inputs`, `replay` and `staging` where they get no turn."""
        if not self.waits or self._held:
            return self.refused()
        return UsageError(
            "using a program's static buffers from outside",
            found='it was compiled with threads="serialize", and what is written to them between calls no call '
            "can wait for",
            remedy='call program(…), or compile with threads="refuse" and use it from one thread at a time',
        )

    def _wait(self, _: bool) -> bool:
        thread = current_thread()
        if self._taken and self._thread is thread:
            return False
        self._lock.acquire()
        if self._thread is not thread:
            try:
                # Threads may have streams of their own: what the last one began must have read and written its part.
                self._device.synchronize()
            except BaseException:
                self._lock.release()
                raise
            self._thread = thread
        self._taken = True
        return True

    def _end(self) -> None:
        self._taken = False
        self._lock.release()


def _never(_: bool) -> bool:
    return False
