"""The suite that each process of a case in several processes runs: collect.py starts them, the parts judge inside.

The environment variables of torchrun (set by job.py) give a process its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case
from core_conformance.cases.processes import forwards, fusions, llama, ops
from core_conformance.cases.processes.part import CASE_TIMEOUT_S, Part, joined
from core_conformance.trial import Trial

CASES = ()
"""This module has no cases of level 0."""


def parts(device: Device) -> Iterator[Part]:
    """Yield what the ranks of a job run on a device."""
    for module in (ops, forwards, fusions, llama):
        yield from module.parts(device)


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield this process's share of each case."""
    for part in parts(device):
        yield Case(id=part.id, what=part.what, run=partial(_run, part=part), timeout_s=CASE_TIMEOUT_S)


def _run(trial: Trial, *, part: Part) -> None:
    place = joined(trial)
    trial.same("the number of processes", place.size, trial.ranks)
    part.run(trial, place)
