"""Steps of the engine, one behind the other: begun before the tokens of the one before are known, and taken back where
one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

from core.engine.serve.handing import Done
from core.engine.serve.request import Completion
from core.engine.serve.scheduler import Scheduler
from core.engine.serve.stats import EngineStats
from core.engine.serve.tokens import TokenReader
from core.engine.steps.drafts import Drafter
from core.engine.steps.model_runner import ModelRunner
from core.engine.steps.shaping import needs_host
from core.engine.steps.step import Flight, Step
from core.errors import UsageError

Timeline = list[tuple[str, int, int, dict[str, Any]]]
"""A timed action of the engine: a name, begin and end in nanoseconds of `time.perf_counter_ns`, and further fields."""
TURN_S = 0.02
"""Seconds that steps in a row may take: a request that arrives waits so long at most, and a text grows so often."""
MOST = 32
"""Steps in a row at most: the host's work of each is small by then, and those behind the end of a text are in vain."""


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


class Pace:
    """Chooses how many decode steps run in a row before the host looks at their tokens (multi-step scheduling), by what
    steps took before.

    Where the device computes while the host waits, the host's work of a step (tokens to texts, the next step's inputs)
    is added to each step, and of a small model it takes longer than the step itself. Steps in a row share it.
    """

    def __init__(self, asked: int | None) -> None:
        """asked: `EngineConfig.decode_steps`."""
        self._asked = asked
        #: By number of sequences: seconds of one step, averaged over the last ones.
        self._seconds: dict[int, float] = {}
        #: Steps in a row at most, whatever was asked for; may be changed at any time.
        self.most = MOST if asked is None else asked

    def times(self, num_seqs: int) -> int:
        """Return how many steps of so many sequences may run in a row."""
        if self._asked is not None:
            return min(self._asked, self.most)
        seconds = self._seconds.get(num_seqs)
        return 1 if seconds is None else max(1, min(self.most, int(TURN_S / seconds)))

    def took(self, num_seqs: int, times: int, seconds: float) -> None:
        """Note how long steps in a row took together."""
        each = seconds / times
        self._seconds[num_seqs] = (self._seconds.get(num_seqs, each) + each) / 2


class StepLoop:
    """Schedules and runs the steps of one engine; at most one is under way when `next` returns."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, drafter: Drafter, counts: EngineStats, pace: Pace
    ) -> None:
        self._runner = runner
        #: How many steps run in a row.
        self.pace = pace
        self._scheduler = scheduler
        self._drafter = drafter
        self._counts = counts
        self._read = TokenReader(counts).read
        self._flight: Flight | None = None
        #: The step that was begun last, until others hold it.
        self._begun: Step | None = None
        #: The step that was computed, until its tokens are handed out.
        self._done: Done | None = None
        #: The list that collects timed actions; None collects nothing.
        self.timeline: Timeline | None = None

    def next(self, lives: Callable[[int], object], wants_logits: Callable[[Step], bool], *, ahead: bool) -> Done | None:
        """Wait for the next step and return what it gave; None where there is nothing to do.

        ahead: begin the step behind it first, where it can be queued; not where its logits are needed on the host,
        which are there until the next step runs. lives: returns, by its index, whether a sequence is still wanted.
        Where anything fails, the sequences are as they were before, and the steps are computed again. What was returned
        is returned again until it is handed out.
        """
        if self._done is not None:
            return self._done
        self._begun = None
        flight = self._flight
        try:
            if flight is None or not any(lives(part.sequence.index) for part in flight.step.parts):
                self._flight = None
                flight = self._begin(None, alone=None if ahead else wants_logits)
            if flight is None:
                return None
            wanted = wants_logits(flight.step)
            may_follow = ahead and not wanted and not needs_host(flight.step)
            self._flight = self._begin(flight) if may_follow else None
            start = time.perf_counter_ns()
            tokens = self._read(flight.step, flight.output)
            self._note("wait", start, flight.step)
            logits = flight.output.all_logits().detach().to("cpu", copy=True) if wanted else None
            self._counts.count(
                flight.step,
                padding=flight.output.padding,
                preempted=self._scheduler.num_preempted,
                drafted_by=self._drafter.kind,
            )
            self._done = Done(flight.step, tokens, logits)
        except BaseException:
            self._done = None
            self._undo(flight)
            raise
        return self._done

    def handed_out(self) -> None:
        """Forget what `next` gave: each of its parts was handed out."""
        self._done = None

    @property
    def untold(self) -> Mapping[int, int]:
        """Requests with outputs that an interrupted step holds back for the next one, and the number of tokens of
        each."""
        done = self._done
        return {} if done is None else {each.request_id: len(each.token_ids) for each in done.outputs.values()}

    def withdraw(self, request_id: int) -> Completion | None:
        """Forget the output that is held back of a request; return its completion, if that is in it."""
        return None if self._done is None else self._done.withdraw(request_id)

    def close(self) -> None:
        """Forget the steps under way."""
        self._flight = self._done = None

    def _begin(self, behind: Flight | None, alone: Callable[[Step], bool] | None = None) -> Flight | None:
        """Run the next step; None where there is nothing to do, or where it can't be queued behind another one.

        alone: where no step is queued behind another one, so that steps may run several times; tells whether one is
        wanted with its logits, and may not.
        """
        start = time.perf_counter_ns()
        step = self._scheduler.schedule()
        if step is not None and alone is not None and step.phase == "decode":
            step = self._repeated(step, alone)
        self._begun = step
        output = None if step is None else self._runner.run(step, behind)
        if step is None or output is None:
            self._begun = None
            return None
        self._drafter.follow(step)
        self._note("begin", start, step)
        for part in step.parts:
            part.launched(step.times)
        if step.phase == "decode" and behind is None:
            self.pace.took(len(step.parts), step.times, (time.perf_counter_ns() - start) * 1e-9)
        self._counts.ahead += behind is not None
        return Flight(step, output)

    def _repeated(self, step: Step, wants_logits: Callable[[Step], bool]) -> Step:
        """Return a step of decode, to be run as often as is worth it, before all of its sequences end."""
        times = min(self.pace.times(len(step.parts)), *(part.sequence.num_left for part in step.parts))
        if times < 2 or needs_host(step) or wants_logits(step) or not self._runner.repeats(step):
            return step
        return replace(step, times=self._scheduler.grow(step, times))

    def _note(self, name: str, start: int, step: Step) -> None:
        if self.timeline is not None:
            about = {"phase": step.phase, "tokens": step.num_tokens, "sequences": len(step.parts), "times": step.times}
            self.timeline.append((name, start, time.perf_counter_ns(), about))

    def _undo(self, flight: Flight | None) -> None:
        """Reset all sequences to before the steps under way."""
        steps = [each.step for each in (self._flight, flight) if each is not None]
        steps += [] if self._begun is None else [self._begun]
        self._flight = self._begun = None
        self._scheduler.take_back({id(each): each for each in steps}.values())
