"""Progress of a run, shown while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from core_conformance.case import AREAS, CaseInfo
from core_conformance.outcome import BAD, Outcome
from core_conformance.report.overview import counts_text, seconds_text

_SILENCE_S = 20.0


class Progress:
    """Tells how far a run is, on standard error: a bar on a terminal, else one line per finished area, and one after
    `_SILENCE_S` seconds without any.

    Use as a context manager around `session.run`, which calls `collected`, `finished` and `waiting`. console: another
    place than standard error.
    """

    def __init__(self, *, console: Console | None = None) -> None:
        self._left: dict[str, set[str]] = {area: set() for area in AREAS}
        self._seen: dict[str, dict[str, Outcome]] = {area: {} for area in AREAS}
        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._num_bad = 0
        self._told_s = time.monotonic()
        self._bar = Bar(
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[bad]}", style="red", markup=False),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("collecting the cases", total=None, bad="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Release the terminal, for a debugger."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def collected(self, cases: Sequence[CaseInfo]) -> None:
        """Take note of the cases that `finished` will be called for."""
        for case in cases:
            self._left[case.area].add(case.id)
        self._bar.update(self._task, total=len(cases), description="")

    def finished(self, outcome: Outcome) -> None:
        """Take note of a case that is done."""
        left, seen = self._left[outcome.area], self._seen[outcome.area]
        if outcome.id not in left:
            return
        left.remove(outcome.id)
        seen[outcome.id] = outcome
        self._num_bad += outcome.status in BAD
        bad = f"{self._num_bad} failed" if self._num_bad else ""
        self._bar.update(self._task, advance=1, description=outcome.id, bad=bad)
        if self._console.is_terminal:
            return
        if not left:
            numbers = counts_text(Counter(each.status for each in seen.values()))
            took = seconds_text(sum(each.elapsed_s for each in seen.values()))
            self._tell(f"{outcome.area}: {numbers} ({took})")
        else:
            self._tell_how_far()

    def waiting(self, case_id: str, elapsed_s: float) -> None:
        """Take note that no case has ended for a while; case_id: the one that has run longest, for so many seconds."""
        if elapsed_s < _SILENCE_S:
            return
        running = f"{case_id} runs for {seconds_text(elapsed_s)}"
        self._bar.update(self._task, description=running)
        if not self._console.is_terminal:
            self._tell_how_far(f"; {running}")

    def _tell_how_far(self, more: str = "") -> None:
        if time.monotonic() - self._told_s > _SILENCE_S:
            done, open_ = (sum(map(len, cases.values())) for cases in (self._seen, self._left))
            bad = f", {self._num_bad} failed" if self._num_bad else ""
            self._tell(f"{done} of {done + open_} cases done{bad}{more}")

    def _tell(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
        self._told_s = time.monotonic()
