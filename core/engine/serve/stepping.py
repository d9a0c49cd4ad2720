"""Steps of the engine, one behind the other: begun before the tokens of the one before are known, and taken back where
one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from core.engine.serve.scheduler import Scheduler
from core.engine.serve.stats import EngineStats
from core.engine.serve.tokens import TokenReader
from core.engine.steps.drafts import Drafter
from core.engine.steps.runner import ModelRunner
from core.engine.steps.shaping import needs_host
from core.engine.steps.step import Flight, Step
from core.errors import UsageError

Timeline = list[tuple[str, int, int, dict[str, Any]]]
"""A timed action of the engine: a name, begin and end in nanoseconds of `time.perf_counter_ns`, and further fields."""


class Done(NamedTuple):
    """A step that was computed."""

    step: Step
    #: One for each of its rows.
    tokens: list[int]
    #: (rows, vocabulary) on the host, where they were wanted.
    logits: Tensor | None


class StepTurn:
    """Excludes changes to an engine's requests while a step runs."""

    def __init__(self) -> None:
        self._lock = Lock()

    def taken(self, asked: str) -> Lock:
        """Return what is to be entered to step or to change requests; raise `UsageError` where something else has
        entered."""
        # Not by `acquire`: an interrupt between that and a `try` would leave the lock held for ever.
        if self._lock.locked():
            raise UsageError(
                asked,
                found="a step of this engine is under way, in another thread or below a signal handler",
                remedy="use an engine from one thread at a time, between steps; core.AsyncEngine serves many callers",
            )
        return self._lock


class StepLoop:
    """Schedules and runs the steps of one engine; at most one is under way when `next` returns."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, drafter: Drafter, counts: EngineStats) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._drafter = drafter
        self._counts = counts
        self._read = TokenReader(counts).read
        self._flight: Flight | None = None
        #: The list that collects timed actions; None collects nothing.
        self.timeline: Timeline | None = None

    def next(self, *, ahead: bool, lives: Callable[[int], object], wants_logits: Callable[[Step], bool]) -> Done | None:
        """Wait for the next step and return what it gave; None where there is nothing to do.

        ahead: begin the step behind it first, where it can be queued; not where its logits are needed on the host,
        which are there until the next step runs. lives: returns, by its index, whether a sequence is still wanted.
        Where anything fails, the sequences are as they were before, and the steps are computed again.
        """
        flight = self._flight
        try:
            if flight is None or not any(lives(part.sequence.index) for part in flight.step.parts):
                self._flight = None
                flight = self._begin(None)
            if flight is None:
                return None
            wanted = wants_logits(flight.step)
            may_follow = ahead and not wanted and not needs_host(flight.step)
            self._flight = self._begin(flight) if may_follow else None
            start = time.perf_counter_ns()
            tokens = self._read(flight.step, flight.output)
            self._note("wait", start, flight.step)
            logits = flight.output.logits.detach().to("cpu", copy=True) if wanted else None
        except BaseException:
            self._undo(flight)
            raise
        self._counts.count(
            flight.step,
            padding=flight.output.padding,
            preempted=self._scheduler.num_preempted,
            drafted_by=self._drafter.kind,
        )
        return Done(flight.step, tokens, logits)

    def close(self) -> None:
        """Forget the step under way."""
        self._flight = None

    def _begin(self, behind: Flight | None) -> Flight | None:
        """Run the next step; None where there is nothing to do, or where it can't be queued behind another one."""
        start = time.perf_counter_ns()
        step = self._scheduler.schedule()
        output = None if step is None else self._runner.run(step, behind)
        if step is None or output is None:
            return None
        self._drafter.follow(step)
        self._note("begin", start, step)
        for part in step.parts:
            part.launched()
        self._counts.ahead += behind is not None
        return Flight(step, output)

    def _note(self, name: str, start: int, step: Step) -> None:
        if self.timeline is not None:
            about = {"phase": step.phase, "tokens": step.num_tokens, "sequences": len(step.parts)}
            self.timeline.append((name, start, time.perf_counter_ns(), about))

    def _undo(self, flight: Flight | None) -> None:
        """Reset all sequences to before the steps under way."""
        under_way, self._flight = {id(each): each for each in (self._flight, flight) if each is not None}, None
        self._scheduler.take_back(each.step for each in under_way.values())
