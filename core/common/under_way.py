"""Work in two parts: what this process does at once, and what other processes, such as a compiler, do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

_Result = TypeVar("_Result")
Ready = Callable[[], bool]
"""Tells whether what a pause waits for has happened; asked by any thread, at any time, and does not wait itself."""
Steps = Generator[Ready, None, _Result]
"""A generator that pauses once others work on their own, waits for them when it goes on, and returns the result.

It pauses any number of times, or never. Closed while it pauses, it ends what it has started and leaves nothing behind.
A state of the process, such as a mode of torch, must not be held over a pause.
"""


def finish(steps: Steps[_Result]) -> _Result:
    """Go through all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class UnderWay(Generic[_Result]):
    """Steps that were begun."""

    def __init__(self, steps: Steps[_Result]) -> None:
        """Go up to the first pause; an error on the way is raised here."""
        self._steps = steps
        self._done: list[_Result] = []
        self._ready: Ready = bool
        self._next()

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return bool(self._done)

    def advance(self) -> bool:
        """Go on as far as nothing has to be waited for; return whether anything was done. Raises what went wrong."""
        moved = False
        while not self._done and self._ready():
            self._next()
            moved = True
        return moved

    def finish(self) -> _Result:
        """Return the result, and wait for it; raise what went wrong meanwhile."""
        while not self._done:
            self._next()
        return self._done[0]

    def abandon(self) -> None:
        """End what is still running."""
        self._steps.close()

    def _next(self) -> None:
        try:
            self._ready = next(self._steps)
        except StopIteration as end:
            self._done.append(end.value)
