"""Where the time of a run went: each phase of its start, and each step of its generation, with begin and end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.compilation.options import Progress
    from core.compilation.report import ProgramReport
    from core.engine.serve.engine import Engine


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on, from `start_s` to `end_s`, in seconds since the run began."""

    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step of the engine, in seconds since the run began.

    It is begun from `start_s` on for `begin_s` (choosing what it computes, copying its inputs, queueing it), and its
    result was waited for from `wait_start_s` to `end_s`; on a device that computes while it is called, all is in
    `begin_s`. Where steps are queued ahead, one begins before the result of the one before it is there.
    """

    phase: str
    tokens: int
    sequences: int
    #: How often the step ran in a row.
    times: int
    start_s: float
    begin_s: float
    wait_start_s: float
    end_s: float


class RunTimeline:
    """What a run is told to be doing, as spans that follow each other without gaps."""

    def __init__(self, first: str) -> None:
        """Begin now, with what is going on first."""
        self._begin = time.perf_counter()
        self._name = self._around = first
        self._since = 0.0
        self._spans: list[Span] = []
        self.steps: list[StepSpan] = []

    def mark(self, name: str) -> None:
        """Say what is going on from now on."""
        self._around = name
        self._turn(name)

    def watched(self, progress: Progress) -> Progress:
        """Return a function that tells `progress`, and keeps what it tells. Behind counted work goes on what was told
        before it."""

        def tell(what: str, done: int, total: int) -> None:
            if not total:
                self.mark(what)
            else:
                self._turn(what if done < total else self._around)
            progress(what, done, total)

        return tell

    def _turn(self, name: str) -> None:
        if name != self._name:
            now = time.perf_counter() - self._begin
            self._spans.append(Span(self._name, self._since, now))
            self._name, self._since = name, now

    def itemise(self, report: ProgramReport) -> None:
        """Split what was told of each phase and bucket by what its program says that it took.

        Graphs are lowered in threads of their own: of this, only what a capture waited for is shown.
        """
        for phase in report.modes:
            made = [trace for trace in report.traces if trace.phase == phase and not trace.cached]
            parts = {
                f"tracing {phase}": sum(trace.trace_s for trace in made),
                f"passes on {phase}": sum(trace.passes_s + trace.aten_s for trace in made),
                f"choosing and building kernels of {phase}": sum(trace.choose_s for trace in made),
            }
            self._split(f"trace {phase}", parts, f"preparing {phase}")
        for bucket in report.buckets:
            span = next((span for span in reversed(self._spans) if span.name == f"capture {bucket.key}"), None)
            if span is not None:
                waited = max(span.seconds - bucket.capture_s, 0.0)
                self._split(span.name, {f"lowering {bucket.key}": waited}, f"capturing {bucket.key}")

    def _split(self, name: str, parts: Mapping[str, float], rest: str) -> None:
        """Put parts, one behind the other, in place of the last span of this name; rest: the name of what is left."""
        place = max((at for at, span in enumerate(self._spans) if span.name == name), default=None)
        if place is None:
            return
        whole, found = self._spans[place], []
        since = whole.start_s
        for part, seconds in parts.items():
            until = min(since + seconds, whole.end_s)
            found += [Span(part, since, until)] if until > since else []
            since = until
        found += [Span(rest, since, whole.end_s)] if since < whole.end_s else []
        self._spans[place : place + 1] = found

    @contextmanager
    def generating(self, engine: Engine) -> Iterator[None]:
        """Keep the steps of a generation."""
        self.mark("generating")
        with engine.timeline() as noted:
            yield
        begun: list[tuple[int, int, dict[str, Any]]] = []
        for name, start, end, about in noted:
            if name == "begin":
                begun.append((start, end, about))
            elif begun:
                self.steps.append(self._step(*begun.pop(0), start, end))

    def _step(self, start: int, begun: int, about: dict[str, Any], wait: int, end: int) -> StepSpan:
        return StepSpan(
            phase=about["phase"],
            tokens=about["tokens"],
            sequences=about["sequences"],
            times=about["times"],
            start_s=start * 1e-9 - self._begin,
            begin_s=(begun - start) * 1e-9,
            wait_start_s=wait * 1e-9 - self._begin,
            end_s=end * 1e-9 - self._begin,
        )

    def spans(self) -> list[Span]:
        """Return all spans, the one that is going on to now."""
        return [*self._spans, Span(self._name, self._since, time.perf_counter() - self._begin)]

    def to_json(self) -> dict[str, Any]:
        """Return the field `timeline` of core.run/1 (docs/json.md)."""
        return {"phases": [asdict(span) for span in self.spans()], "steps": [asdict(step) for step in self.steps]}
