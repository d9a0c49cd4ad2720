"""The suite as pytest items: `pytest --pyargs core_conformance -p core_conformance.pytest_plugin --device NAME`.

One item per case, so that pytest's own selection, reports and xdist work. Cases run in a worker process as they do
under `core conformance`: a crash or a time-out is one failed item. Loaded with `-p` only: an entry point would ask
every pytest run of the environment for a device.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from core.errors import CoreError
from core_conformance.case import MAX_LEVEL, CaseInfo
from core_conformance.outcome import Outcome
from core_conformance.ranks import DEFAULT_RANKS, MAX_RANKS
from core_conformance.rules.expectations import Expectations
from core_conformance.rules.levels import reached
from core_conformance.runner.lanes import ProcessLane
from core_conformance.runner.protocol import SuiteModules, WorkerOptions
from core_conformance.runner.selection import Rules, choose
from core_conformance.runner.session import collect

_PROPERTY = "core_conformance"
_MAX_OBSTACLES = 5

RunCase = Callable[[CaseInfo], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options: `--device`, and the others of `core conformance` with a prefix that no plugin has."""
    # Values are plain, since xdist sends them to its processes.
    group = parser.getgroup("core", "conformance of a device of core")
    group.addoption("--device", dest="core_device", metavar="NAME", help="device to prove, as `core devices` lists it")
    group.addoption(
        "--core-level", type=int, default=MAX_LEVEL, choices=range(MAX_LEVEL + 1), help="highest level to prove"
    )
    group.addoption("--core-seed", type=int, default=0, help="seed of every random choice")
    group.addoption("--core-fuzz", type=int, default=0, help="examples per fuzzing case; 0 leaves them out")
    group.addoption("--core-xfail", metavar="FILE", help="expected failures of the plugin (core.xfail/1, TOML)")
    group.addoption("--core-threads", type=int, help="torch threads of the worker")
    group.addoption("--core-timeout-factor", type=float, default=1.0, help="multiplies the time of each case")
    group.addoption(
        "--core-ranks",
        type=int,
        default=DEFAULT_RANKS,
        choices=range(2, MAX_RANKS + 1),
        help="processes of each case that runs in several",
    )
    group.addoption("--core-suite", help=argparse.SUPPRESS)


class Suite:
    """The collected cases of one pytest process, and the worker that runs them."""

    def __init__(self, config: pytest.Config) -> None:
        """Collect; raise `CoreError` where nothing can be run: an unknown device, a bad file of expected failures."""
        options: Any = config.option
        expected = Expectations.load(Path(options.core_xfail)) if options.core_xfail else Expectations()
        # The tests of this suite run others: modules with `CASES` and `collect`.
        other = options.core_suite
        worker = WorkerOptions(
            device=options.core_device,
            seed=options.core_seed,
            fuzz=options.core_fuzz,
            threads=options.core_threads,
            timeout_factor=options.core_timeout_factor,
            ranks=options.core_ranks,
            suite=SuiteModules(host=other, collectors=(other,)) if other else SuiteModules(),
        )
        self.lane = ProcessLane(worker)
        try:
            self.collected = collect(self.lane)
            self.rules = Rules(self.collected, expected)
            self.cases = choose(self.collected, level=options.core_level, fuzz=options.core_fuzz)
        except BaseException:
            self.lane.close()
            raise
        # One file per device, never removed: after a removal, new processes would lock another file than those that
        # wait.
        lock = Path(tempfile.gettempdir(), f"core-conformance-{os.getuid()}-{self.collected.name}.lock")
        self._lock = lock if hasattr(config, "workerinput") else None

    def run(self, case: CaseInfo) -> Outcome:
        """Run one case and return its outcome under the plugin's declarations."""
        declared = self.rules.declared(case)
        if declared is not None:
            return declared
        with self._turn(exclusive=case.exclusive):
            return self.rules.judge(self.lane.run(case))

    def close(self) -> None:
        """End the worker."""
        self.lane.close()

    @contextmanager
    def _turn(self, *, exclusive: bool) -> Iterator[None]:
        """Wait until no other xdist process runs an exclusive case (or, for an exclusive case, any case)."""
        if self._lock is None:
            yield
            return
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield


_SUITE = pytest.StashKey[Suite]()


def suite_of(config: pytest.Config) -> Suite:
    """Return the suite of this run, collected on first use; raise pytest's error of collection where it can't be."""
    if _SUITE not in config.stash:
        if not config.getoption("core_device"):
            refuse("no device is chosen\n  to do: give --device NAME; `core devices` lists the names")
        try:
            config.stash[_SUITE] = Suite(config)
        except CoreError as error:
            refuse(str(error))
    return config.stash[_SUITE]


def refuse(text: str) -> NoReturn:
    """End the collection of the suite with this text alone, no traceback."""
    raise pytest.Collector.CollectError(f"core conformance: {text}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item of each case."""
    if "conformance_case" in metafunc.fixturenames:
        cases = suite_of(metafunc.config).cases
        metafunc.parametrize("conformance_case", cases, ids=[case.id for case in cases])


@pytest.fixture
def run_conformance_case(request: pytest.FixtureRequest) -> RunCase:
    """Return a function that runs a case, keeps its outcome for the summary, and ends as pytest's outcome."""
    suite = suite_of(request.config)

    def run(case: CaseInfo) -> None:
        outcome = suite.run(case)
        # Kept with the outcome, since the process that prints the summary may have collected nothing.
        about = {"num_cases": len(suite.cases), "problem": suite.collected.problem}
        request.node.user_properties.append((_PROPERTY, json.dumps({"outcome": outcome.to_json(), **about})))
        report(outcome)

    return run


def report(outcome: Outcome) -> None:
    """Turn an outcome into pytest's: skip what is not supported or lacks something, fail what is bad."""
    if outcome.status in ("not-supported", "skip"):
        pytest.skip(f"{outcome.status}: {outcome.reason}")
    if outcome.status == "xfail":
        pytest.xfail(" ".join(filter(None, (outcome.reason, *outcome.notes[-1:]))))
    if outcome.status != "pass":
        notes = (f"note: {note}" for note in outcome.notes)
        text = (f"{outcome.status}: {outcome.reason}", outcome.detail, *notes)
        pytest.fail("\n".join(filter(None, text)), pytrace=False)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which level the run has proven, and what is in the way of the next one."""
    told = _outcomes_of(terminalreporter.stats)
    if not told:
        return
    # A case that ran again counts by its last run.
    outcomes = {each["outcome"]["id"]: Outcome.from_json(each["outcome"]) for each in told}
    asked = config.getoption("core_level")
    complete = len(outcomes) == told[0]["num_cases"]
    level, obstacles = reached(list(outcomes.values()), complete=complete, level=asked)
    if told[0]["problem"]:
        obstacles = (f"the cases above level 0 could not be collected: {told[0]['problem']}", *obstacles)
    terminalreporter.section("core conformance")
    name = "none" if level is None else f"{level} of {asked}"
    terminalreporter.line(f"device {config.getoption('core_device')}: level {name}")
    for line in obstacles[:_MAX_OBSTACLES]:
        terminalreporter.line(f"  {' '.join(line.split())}")
    if len(obstacles) > _MAX_OBSTACLES:
        terminalreporter.line(f"  and {len(obstacles) - _MAX_OBSTACLES} more")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the worker."""
    suite = config.stash.get(_SUITE, None)
    if suite is not None:
        suite.close()


def _outcomes_of(stats: dict[str, list[Any]]) -> list[dict[str, Any]]:
    reports = (each for found in stats.values() for each in found)
    properties = (pair for each in reports for pair in getattr(each, "user_properties", ()))
    return [json.loads(value) for name, value in properties if name == _PROPERTY]
