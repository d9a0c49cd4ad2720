"""Turns at a program's static memory: one call at a time; a concurrent call is refused or waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, RLock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from core.device import Device

Threads = Literal["refuse", "serialize"]


class Turns:
    """Manages the turns of one program. A user reads `begun`, raises `refused()` if `busy()`, enters `lock`, and calls
    `begin`.

    Only a lock's `with` statement is safe from an interrupt (Ctrl-C). An interrupt between `acquire` and a `try` behind
    it would leave the turn taken for ever.
    """

    def __init__(self, threads: Threads, device: Device) -> None:
        """threads: as in `CompileOptions`."""
        self._device = device
        #: The thread that has a turn or had the last one; known only where calls wait.
        self._thread: Thread | None = None
        #: The number of turns begun so far.
        self.begun = 0
        #: Whether this process was forked while another thread held the turn; that thread does not exist here.
        self.orphaned = False
        self.waits = threads == "serialize"
        lock = Lock()
        #: Held during a turn.
        self.lock: Any = RLock() if self.waits else lock
        # Returns whether a whole call has to be refused. In mode "refuse" this is the lock's own method, to keep calls
        # cheap.
        self.busy: Callable[[], bool] = self._inside if self.waits else lock.locked
        #: Returns whether the use of buffers outside of a turn (by the caller) has to be refused.
        self.busy_part: Callable[[], bool] = _always if self.waits else lock.locked
        self._own = self.busy, self.busy_part
        self._held = ""
        if self.waits:
            _WAITED_FOR.add(self)

    def hold(self, reason: str) -> None:
        """Refuse every turn except `anyway` from now on, for this reason; "" lifts the refusal."""
        self._held = reason
        self.busy, self.busy_part = (_always, _always) if reason else self._own

    @contextmanager
    def anyway(self) -> Iterator[None]:
        """Take a whole turn, even while `hold` refuses turns; raise `UsageError` if another call has it."""
        before = self.begun
        if self._own[0]():
            raise self.refused()
        with self.lock:
            self._begin(before)
            yield

    def begin(self, before: int) -> None:
        """Begin a turn, with the lock held; raise `UsageError` where calls are refused and one came in between.

        before: what `begun` was when the lock was found free.
        """
        if self._held:  # a reason may have been set while this thread waited for the lock
            raise self.refused()
        self._begin(before)

    def _begin(self, before: int) -> None:
        if self.waits:
            thread = current_thread()
            if self._thread is not thread:
                # Threads may use different streams: the work queued in the last turn must be finished first.
                self._device.synchronize()
                self._thread = thread
        elif self.begun != before:
            raise self.refused()
        self.begun = before + 1

    def refused(self) -> UsageError:
        """Return the error for a call that got no turn."""
        if self._held:
            return UsageError("calling a program", found=self._held, remedy="load_weights with all of the weights")
        asked = "calling a program while another call of it runs"
        remedy = "call it from one thread at a time, compile one program for each, or "
        if self.orphaned:
            found = "this process was forked while another thread's call ran, which left its memory half-written"
            return UsageError(asked, found=found, remedy="compile the program in this process, or fork between calls")
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

    def forked(self) -> None:
        """Note, in a new process, whether the turn belongs to a thread of the process before."""
        if not self.lock.acquire(blocking=False):
            self.orphaned = True
        else:
            self.lock.release()

    def _inside(self) -> bool:
        # `threading.Condition` asks the same way: any flag of ours could be left set by an interrupt.
        return self.orphaned or bool(self.lock._is_owned())


def copied(result: Any, own: Sequence[Tensor]) -> Any:
    """Return a result with a copy of each tensor that is not one of the caller's `own`; states and weights are copied
    too."""
    import torch  # imported here: options are checked before torch is imported
    from torch.utils import _pytree as pytree

    if isinstance(result, torch.Tensor):
        return result if any(result is each for each in own) else result.detach().clone()
    return pytree.tree_map_only(torch.Tensor, lambda tensor: copied(tensor, own), result)


def _always() -> bool:
    return True


def _forked() -> None:
    for turns in tuple(_WAITED_FOR):
        turns.forked()


_WAITED_FOR: WeakSet[Turns] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
