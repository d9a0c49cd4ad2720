"""One run of the suite: collect, run on as many lanes as pay, and put together the report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import CoreError, PluginConflictError, UnknownDeviceError, UsageError, error_from_json
from core.host.selection import check_name
from core_conformance.case import MAX_LEVEL, CaseInfo
from core_conformance.outcome import BAD, Outcome
from core_conformance.ranks import DEFAULT_RANKS
from core_conformance.report.report import Environment, Report
from core_conformance.rules.expectations import Expectations
from core_conformance.rules.levels import reached
from core_conformance.runner.lanes import Lane, Opening, ProcessLane
from core_conformance.runner.protocol import DEFAULT_THREADS, Collected, SuiteModules, WorkerOptions
from core_conformance.runner.scheduling import run_all
from core_conformance.runner.selection import Rules, choose

if TYPE_CHECKING:
    from core_conformance.runner.progress import Progress
    from core_conformance.runner.worker import OnException

MAX_WORKERS = 4
CASES_PER_WORKER = 16
"""Number of cases from which another process pays off; it must first import torch and open the device."""

# Errors in the request itself, not in the device: nothing can be run.
_NOTHING_TO_RUN = (UsageError, UnknownDeviceError, PluginConflictError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a run."""

    #: The device as asked for.
    device: str
    level: int = MAX_LEVEL
    #: Examples of each case of fuzzing; 0 leaves them out.
    fuzz: int = 0
    seed: int = 0
    #: Ids or globs of the cases to run, empty for all.
    chosen: tuple[str, ...] = ()
    #: Worker processes, None for as many as pay.
    workers: int | None = None
    #: Threads of torch in each worker, None for one.
    threads: int | None = None
    fail_fast: bool = False
    #: Whether cases run here, one after the other, with no isolation.
    in_process: bool = False
    #: The file of expected failures.
    xfail: Path | None = None
    #: Multiplies the time that each case may take.
    timeout_factor: float = 1.0
    #: Processes of each case that runs in several.
    ranks: int = DEFAULT_RANKS
    suite: SuiteModules = field(default_factory=SuiteModules)


class Interrupted(KeyboardInterrupt):
    """An interrupt that came while cases ran; it carries the report on those that were done by then."""

    def __init__(self, report: Report, interrupt: KeyboardInterrupt) -> None:
        super().__init__()
        self.report, self.interrupt = report, interrupt


class _Stopped(Exception):
    """Raised where --fail-fast has seen its failure."""


def run(options: Options, progress: Progress | None = None, *, on_exception: OnException | None = None) -> Report:
    """Run the suite and report; the outcomes are in the order of collection, whatever the lanes did.

    on_exception: for `in_process`, called with what a case raised before it becomes a failure. A device that does not
    open is reported, with level 0 run. Raises `CoreError` where nothing can be run: an unknown device or case, a bad
    file of expected failures. A KeyboardInterrupt goes through once every worker is killed; as `Interrupted` where some
    cases were done by then.
    """
    _check_device(options.device)
    started, start = datetime.now(UTC), time.perf_counter()
    expectations = Expectations() if options.xfail is None else Expectations.load(options.xfail)
    with ExitStack() as stack:
        opening = Opening()

        def lane(device: str) -> Lane:
            return stack.enter_context(closing(_lane(options, device, opening, on_exception)))

        first = lane(options.device)
        collected = collect(first)
        rules = Rules(collected, expectations)
        cases = choose(collected, level=options.level, fuzz=options.fuzz, chosen=options.chosen)
        if progress is not None:
            progress.collected(cases)
        outcomes = _Outcomes(cases, rules, progress, options.fail_fast)
        to_run = outcomes.take_declared()
        lanes = [first, *(lane(collected.name) for _ in range(_num_lanes(options, len(to_run)) - 1))]
        interrupt = outcomes.run(lanes, to_run, in_process=options.in_process)
    place = Environment.from_json(collected.environment)
    place = replace(place, workers=len(lanes), threads=options.threads or DEFAULT_THREADS)
    level, obstacles = outcomes.reached(collected, options)
    report = Report(
        name=collected.name,
        plugin=collected.plugin,
        environment=place,
        level=options.level,
        fuzz=options.fuzz,
        seed=options.seed,
        ranks=options.ranks,
        started=started.isoformat(timespec="seconds"),
        elapsed_s=time.perf_counter() - start,
        outcomes=outcomes.in_order(),
        cases={case.id: case.what for case in cases},
        reached=level,
        obstacles=obstacles,
        chosen=options.chosen,
    )
    if interrupt is not None:
        raise Interrupted(report, interrupt)
    return report


def list_chosen(options: Options) -> list[CaseInfo]:
    """Return the cases that `run` would run or report, without running any."""
    _check_device(options.device)
    with closing(_lane(options, options.device, Opening(), None)) as lane:
        collected = collect(lane)
    if collected.error is not None:
        raise error_from_json(dict(collected.error))
    cases = choose(collected, level=options.level, fuzz=options.fuzz, chosen=options.chosen)
    rules = Rules(collected, Expectations())
    declared = ((case, rules.declared(case)) for case in cases)
    return [case if outcome is None else replace(case, not_supported=outcome.reason) for case, outcome in declared]


def _check_device(name: str) -> None:
    """Refuse a device that nothing can be run on, before a worker imports torch."""
    try:
        check_name(name)
    except _NOTHING_TO_RUN:
        raise
    except CoreError:
        return  # a plugin that can't be loaded, which the cases of level 0 report


class _Outcomes:
    """The outcomes of a run as they come, by id."""

    def __init__(self, cases: Sequence[CaseInfo], rules: Rules, progress: Progress | None, fail_fast: bool) -> None:
        self._cases, self._rules, self._progress, self._fail_fast = cases, rules, progress, fail_fast
        self._by_id: dict[str, Outcome] = {}
        # What ended the run before its end; "" where nothing did.
        self._stopped = ""

    def take_declared(self) -> list[CaseInfo]:
        """Note the cases that are declared not supported; return the others."""
        declared = [self._rules.declared(case) for case in self._cases]
        for outcome in filter(None, declared):
            self._add(outcome)
        return [case for case, outcome in zip(self._cases, declared, strict=True) if outcome is None]

    def run(self, lanes: Sequence[Lane], cases: Sequence[CaseInfo], *, in_process: bool) -> KeyboardInterrupt | None:
        """Run cases: those that want the device for themselves last, one at a time, when the other lanes are closed.

        Return the interrupt that ended the run; None where none came, and raised where no case was done by then.
        """
        shared = [case for case in cases if not case.exclusive]
        alone = [case for case in cases if case.exclusive]
        try:
            if in_process:
                for case in (*shared, *alone):
                    self._finished(lanes[0].run(case))
            else:
                waiting = None if self._progress is None else self._progress.waiting
                run_all(lanes, shared, self._finished, waiting)
                run_all(lanes[:1], alone, self._finished, waiting)
        except _Stopped:
            pass
        except KeyboardInterrupt as interrupt:
            if not self._by_id:
                raise
            self._stopped = "the run was interrupted"
            return interrupt
        return None

    def in_order(self) -> tuple[Outcome, ...]:
        """Return one outcome per case; those that did not run any more are skipped."""
        skipped = (Outcome(id=case.id, status="skip", reason=f"not run: {self._stopped}") for case in self._cases)
        return tuple(self._by_id.get(each.id, each) for each in skipped)

    def reached(self, collected: Collected, options: Options) -> tuple[int | None, tuple[str, ...]]:
        """Return the level proven, and why the next one is not."""
        level, obstacles = reached(self.in_order(), complete=not options.chosen, level=options.level)
        if self._stopped:
            obstacles = (self._stopped,)
        if collected.error is not None and options.level:
            obstacles = (f"the cases above level 0 could not be collected: {collected.problem}", *obstacles)
        return level, obstacles

    def _finished(self, outcome: Outcome) -> None:
        outcome = self._rules.judge(outcome)
        self._add(outcome)
        if self._fail_fast and outcome.status in BAD:
            self._stopped = f"the run stopped at the first failure, {outcome.id}"
            raise _Stopped

    def _add(self, outcome: Outcome) -> None:
        self._by_id[outcome.id] = outcome
        if self._progress is not None:
            self._progress.finished(outcome)


def _lane(options: Options, device: str, opening: Opening, on_exception: OnException | None) -> Lane:
    worker = WorkerOptions(
        device=device,
        seed=options.seed,
        fuzz=options.fuzz,
        threads=options.threads,
        timeout_factor=options.timeout_factor,
        ranks=options.ranks,
        suite=options.suite,
    )
    if options.in_process:
        from core_conformance.runner.worker import Session

        return Session(worker, on_exception=on_exception)
    return ProcessLane(worker, opening=opening)


def collect(lane: Lane) -> Collected:
    """Return the cases of a lane; raise `CoreError` where there are none, as for an unknown device."""
    collected = lane.collect()
    names = [kind.__name__ for kind in _NOTHING_TO_RUN]
    if not collected.cases or (collected.error is not None and collected.error["type"] in names):
        assert collected.error is not None
        raise error_from_json(dict(collected.error))
    return collected


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_lanes(options: Options, num_cases: int) -> int:
    if options.in_process:
        return 1
    # An explicit number is always started, but never more than there are cases.
    pay = num_cases if options.workers else -(-num_cases // CASES_PER_WORKER)
    return max(1, min(options.workers or min(MAX_WORKERS, _cores()), pay))
