"""Integers in Python that a traced model counts on: symbols of its trace, and the host's work around each replay.

`self.length += 1` on any object: the trace is valid for those lengths with which the model takes the same branches. The
conditions are asked before a replay, the graph is given the present length where it reads one, and the new length, by
the expression that Dynamo has for it, is assigned after the replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Counted = Mapping[str, tuple[Any, str]]
"""Integers that a trace is to have as symbols: owner and attribute, by Dynamo's name for it."""
Numbers = dict[tuple[int, str], int]
"""Values of counters, by the id of the owner and the attribute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counter:
    """An integer attribute that a trace has as a symbol."""

    #: Dynamo's name for the attribute
    source: str
    owner: Any
    name: str
    symbol: Any
    #: what a forward assigns, in terms of the symbols of all counters and sizes
    after: Any

    @property
    def key(self) -> tuple[int, str]:
        """What tells this counter from others, across traces."""
        return id(self.owner), self.name


class Counting:
    """The counters of one trace at given sizes: whether the trace holds for their values, and their next values."""

    def __init__(self, counters: Sequence[Counter], conditions: Sequence[Any], sizes: Mapping[Any, int]) -> None:
        self._counters = tuple(counters)
        self._conditions = tuple(condition.xreplace(sizes) for condition in conditions)
        self._after = tuple(counter.after.xreplace(sizes) for counter in counters)

    @cached_property
    def _holds(self) -> Callable[..., bool]:
        conditions = " and ".join(f"({_python(condition)})" for condition in self._conditions)
        return self._function(conditions or "True")

    @cached_property
    def _next(self) -> Callable[..., tuple[int, ...]]:
        return self._function(f"({''.join(f'{_python(each)}, ' for each in self._after)})")

    def _function(self, body: str) -> Callable[..., Any]:
        names = ", ".join(str(counter.symbol) for counter in self._counters)
        found: Callable[..., Any] = eval(f"lambda {names}: {body}", {"math": math})
        return found

    def present(self) -> Numbers:
        """Return the values that the counters have now."""
        return {counter.key: getattr(counter.owner, counter.name) for counter in self._counters}

    def holds(self, numbers: Numbers) -> bool:
        """Tell whether the trace is valid for these values of the counters."""
        return bool(self._holds(*(numbers[counter.key] for counter in self._counters)))

    def after(self, numbers: Numbers) -> Numbers:
        """Return the values after a run that began with these."""
        values = self._next(*(numbers[counter.key] for counter in self._counters))
        return numbers | {counter.key: value for counter, value in zip(self._counters, values, strict=True)}

    def assign(self, numbers: Numbers) -> None:
        """Give the counters these values."""
        for counter in self._counters:
            setattr(counter.owner, counter.name, numbers[counter.key])


@contextmanager
def put_back(counters: Sequence[Counter]) -> Iterator[None]:
    """Restore the present values of the counters at the end of the block."""
    values = [getattr(counter.owner, counter.name) for counter in counters]
    try:
        yield
    finally:
        for counter, value in zip(counters, values, strict=True):
            setattr(counter.owner, counter.name, value)


def _python(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expression))
