"""The processes of one job, each with its own lane, started as torchrun does, and the outcomes of a case in all."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import distributed

from core_conformance.case import CaseInfo
from core_conformance.outcome import Outcome
from core_conformance.runner.lanes import ProcessLane
from core_conformance.runner.protocol import SuiteModules, WorkerOptions

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Started:
    """The options of started processes: a case with equal options reuses the processes."""

    options: tuple[WorkerOptions, ...]
    environment: frozenset[tuple[str, str]]
    path: tuple[str, ...]


class Job:
    """Processes that run the same cases; a case that fails in one of them ends all."""

    def __init__(self, options: Sequence[WorkerOptions]) -> None:
        """options: of each process, in the order of ranks."""
        # This process opens the store: a port that is chosen now and opened later might be taken in between.
        # torch documents the class there, and does not list it in the package's stubs.
        store: Any = distributed.TCPStore  # type: ignore[attr-defined]
        self._store = store(_HOST, 0, is_master=True, wait_for_workers=False)
        job = {"MASTER_ADDR": _HOST, "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(len(options))}
        job |= {"TORCHELASTIC_RUN_ID": "core-conformance", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self._lanes = [
            ProcessLane(each, environment={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, each in enumerate(options)
        ]

    def run(self, case: CaseInfo) -> list[Outcome]:
        """Run a case in all processes at once; return the outcomes in the order of ranks."""
        with ThreadPoolExecutor(len(self._lanes)) as pool:
            return list(pool.map(lambda lane: lane.run(case), self._lanes))

    def close(self) -> None:
        """End the processes."""
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.callback(lane.close)


_KEPT: dict[_Started, Job] = {}


def run_in_all(
    case: CaseInfo, devices: Sequence[str], *, suite: str, seed: int, timeout_factor: float
) -> list[Outcome]:
    """Run a case in a process for each device, and return the outcomes in the order of ranks.

    Processes are kept for the next case, as long as none failed: after a failure one of them may still wait for a
    message of another. suite: the module that collects the case there.
    """
    options = tuple(
        WorkerOptions(
            device=device,
            seed=seed,
            timeout_factor=timeout_factor,
            ranks=len(devices),
            suite=SuiteModules(host=suite, collectors=(suite,)),
        )
        for device in devices
    )
    wanted = _Started(options, frozenset(os.environ.items()), tuple(sys.path))
    if wanted not in _KEPT:
        close_kept()
        _KEPT[wanted] = Job(options)
    outcomes: list[Outcome] = []
    try:
        outcomes = _KEPT[wanted].run(case)
    finally:
        if not outcomes or any(outcome.status not in ("pass", "not-supported", "skip") for outcome in outcomes):
            close_kept()
    return outcomes


@atexit.register
def close_kept() -> None:
    """End processes that wait for another case."""
    while _KEPT:
        _KEPT.popitem()[1].close()
