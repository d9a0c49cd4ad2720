"""Work in two parts: what this process does at once, and what other processes, such as a compiler, do meanwhile."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]
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
        try:
            next(steps)
        except StopIteration as end:
            self._done.append(end.value)

    def finish(self) -> _Result:
        """Return the result, and wait for it; raise what went wrong meanwhile."""
        if not self._done:
            self._done.append(finish(self._steps))
        return self._done[0]

    def abandon(self) -> None:
        """End what is still running."""
        self._steps.close()
