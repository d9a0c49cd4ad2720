"""One run of the suite: collect, run on as many lanes as pay, and put together the report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from core.errors import error_from_json
from core_conformance.case import MAX_LEVEL
from core_conformance.outcome import BAD, Outcome
from core_conformance.report.report import Environment, Report
from core_conformance.rules.expectations import Expectations
from core_conformance.rules.levels import reached
from core_conformance.runner.lanes import Lane, LocalLane, ProcessLane
from core_conformance.runner.protocol import DEFAULT_THREADS, CaseInfo, Collected, SuiteModules, WorkerOptions
from core_conformance.runner.scheduling import run_all
from core_conformance.runner.selection import Rules, choose

if TYPE_CHECKING:
    from core_conformance.runner.worker import OnException

MAX_WORKERS = 4
CASES_PER_WORKER = 16
"""So many cases pay for another process, which has to import torch and open the device first."""

# Errors about what was asked for, as against a device that is broken or absent: there is nothing to run then.
_NOTHING_TO_RUN = ("UsageError", "UnknownDeviceError", "PluginConflictError")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a run is about. device: as asked for. chosen: ids or globs, empty for all. fuzz: examples per fuzz case.

    workers: None for as many as pay. threads: of torch in each worker, None for one. in_process: run here, one after
    the other, with no isolation. xfail: file of expected failures. timeout_factor: multiplies the time that each case
    may take.
    """

    device: str
    level: int = MAX_LEVEL
    fuzz: int = 0
    seed: int = 0
    chosen: tuple[str, ...] = ()
    workers: int | None = None
    threads: int | None = None
    fail_fast: bool = False
    in_process: bool = False
    xfail: Path | None = None
    timeout_factor: float = 1.0
    suite: SuiteModules = field(default_factory=SuiteModules)


class Progress(Protocol):
    """Is told how far a run is, in the thread that called `run`."""

    def collected(self, cases: Sequence[CaseInfo]) -> None:
        """Take note of the cases that `finished` will be called for, unless the run is stopped."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """Take note of an outcome; they come in any order."""
        ...


class _Stopped(Exception):
    """Raised where --fail-fast has seen its failure."""


def run(options: Options, progress: Progress | None = None, *, on_exception: OnException | None = None) -> Report:
    """Run the suite and report; the outcomes are in the order of collection, whatever the lanes did.

    on_exception: for `in_process`, called with what a case raised before it becomes a failure. A device that does not
    open is reported, with level 0 run. Raises `CoreError` where nothing can be run: an unknown device or case, a bad
    file of expected failures. A KeyboardInterrupt goes through once every worker is killed.
    """
    started, start = datetime.now(UTC), time.perf_counter()
    expectations = Expectations() if options.xfail is None else Expectations.load(options.xfail)
    with ExitStack() as stack:

        def lane(device: str) -> Lane:
            made = _lane(options, device, on_exception)
            stack.callback(made.close)
            return made

        first = lane(options.device)
        collected = collect(first)
        rules = Rules(collected, expectations)
        cases = choose(collected, level=options.level, fuzz=options.fuzz, chosen=options.chosen)
        if progress is not None:
            progress.collected(cases)
        outcomes = _Outcomes(cases, rules, progress, options.fail_fast)
        to_run = outcomes.take_declared()
        num_lanes = _num_lanes(options, len(to_run))
        lanes = [first, *(lane(collected.name) for _ in range(num_lanes - 1))]
        outcomes.run(lanes, to_run, in_process=options.in_process)
    place = Environment.from_json(collected.environment)
    return _report(
        options,
        collected,
        outcomes,
        replace(place, workers=num_lanes, threads=options.threads or DEFAULT_THREADS),
        started.isoformat(timespec="seconds"),
        time.perf_counter() - start,
    )


def list_chosen(options: Options) -> list[CaseInfo]:
    """Return the cases that `run` would run or report, without running any."""
    lane = _lane(options, options.device, None)
    try:
        collected = collect(lane)
    finally:
        lane.close()
    if collected.error is not None:
        raise error_from_json(dict(collected.error))
    cases = choose(collected, level=options.level, fuzz=options.fuzz, chosen=options.chosen)
    rules = Rules(collected, Expectations())
    declared = ((case, rules.declared(case)) for case in cases)
    return [case if outcome is None else replace(case, not_supported=outcome.reason) for case, outcome in declared]


class _Outcomes:
    """The outcomes of a run as they come, by id."""

    def __init__(self, cases: Sequence[CaseInfo], rules: Rules, progress: Progress | None, fail_fast: bool) -> None:
        self.cases = cases
        self._rules, self._progress, self._fail_fast = rules, progress, fail_fast
        self._by_id: dict[str, Outcome] = {}
        self._failed = ""

    @property
    def stopped_at(self) -> str:
        """The failure that ended the run; "" where it ran to its end."""
        return self._failed

    def take_declared(self) -> list[CaseInfo]:
        """Note the cases that are declared not supported; return the others."""
        left = []
        for case in self.cases:
            outcome = self._rules.declared(case)
            if outcome is None:
                left.append(case)
            else:
                self._add(outcome)
        return left

    def run(self, lanes: Sequence[Lane], cases: Sequence[CaseInfo], *, in_process: bool) -> None:
        """Run cases: those that want the device for themselves last, one at a time, when the other lanes are closed."""
        shared = [case for case in cases if not case.exclusive]
        alone = [case for case in cases if case.exclusive]
        try:
            if in_process:
                for case in (*shared, *alone):
                    self._finished(lanes[0].run(case))
            else:
                run_all(lanes, shared, self._finished)
                run_all(lanes[:1], alone, self._finished)
        except _Stopped:
            pass

    def in_order(self) -> tuple[Outcome, ...]:
        """Return one outcome per case; those that did not run any more are skipped."""
        reason = f"not run: the run stopped at the first failure, {self._failed}"
        return tuple(self._by_id.get(case.id, Outcome(id=case.id, status="skip", reason=reason)) for case in self.cases)

    def _finished(self, outcome: Outcome) -> None:
        outcome = self._rules.judge(outcome)
        self._add(outcome)
        if self._fail_fast and outcome.status in BAD:
            self._failed = outcome.id
            raise _Stopped

    def _add(self, outcome: Outcome) -> None:
        self._by_id[outcome.id] = outcome
        if self._progress is not None:
            self._progress.finished(outcome)


def _lane(options: Options, device: str, on_exception: OnException | None) -> Lane:
    worker = WorkerOptions(
        device=device, seed=options.seed, fuzz=options.fuzz, threads=options.threads, suite=options.suite
    )
    if options.in_process:
        return LocalLane(worker, on_exception=on_exception)
    return ProcessLane(worker, timeout_factor=options.timeout_factor)


def collect(lane: Lane) -> Collected:
    """Return what a lane has to run; raise `CoreError` where that is nothing, as for an unknown device."""
    collected = lane.collect()
    if not collected.cases or (collected.error is not None and collected.error["type"] in _NOTHING_TO_RUN):
        assert collected.error is not None
        raise error_from_json(dict(collected.error))
    return collected


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_workers() -> int:
    return min(MAX_WORKERS, _cores())


def _num_lanes(options: Options, num_cases: int) -> int:
    if options.in_process:
        return 1
    # Asked for in so many words, they are all started; never more than there are cases.
    pay = num_cases if options.workers else -(-num_cases // CASES_PER_WORKER)
    return max(1, min(options.workers or _default_workers(), pay))


def _report(
    options: Options,
    collected: Collected,
    outcomes: _Outcomes,
    environment: Environment,
    started: str,
    elapsed_s: float,
) -> Report:
    ordered = outcomes.in_order()
    level, obstacles = reached(ordered, complete=not options.chosen, level=options.level)
    if outcomes.stopped_at:
        obstacles = (f"the run stopped at the first failure, {outcomes.stopped_at}",)
    if collected.error is not None and options.level:
        obstacles = (f"the cases above level 0 could not be collected: {collected.problem}", *obstacles)
    return Report(
        name=collected.name,
        plugin=collected.plugin,
        environment=environment,
        level=options.level,
        fuzz=options.fuzz,
        seed=options.seed,
        started=started,
        elapsed_s=elapsed_s,
        outcomes=ordered,
        cases={case.id: case.what for case in outcomes.cases},
        reached=level,
        obstacles=obstacles,
        chosen=options.chosen,
    )
