"""Cases in several processes: a collective, a rewritten graph or a sharded model gives what one process has whole.

They stand in the areas they belong to, as `area/processes/…`. Each process opens the device, joins the process group
that torch has for such devices, and runs ranked.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import distributed

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case, CaseInfo
from core_conformance.cases.processes import ranked
from core_conformance.cases.processes.job import run_in_all
from core_conformance.cases.processes.part import CASE_TIMEOUT_S
from core_conformance.outcome import Outcome
from core_conformance.ranks import DEFAULT_RANKS
from core_conformance.trial import NotSupported, Skip, Trial

_LOST = ("timeout", "crash")
# The processes are started, one case takes `CASE_TIMEOUT_S`, and all may take turns on one core.
_TIMEOUT_S = 600.0


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield a case for each part that ranks can run."""
    alone = why_alone(device, DEFAULT_RANKS)
    for part in ranked.parts(device):
        yield Case(
            id=part.id,
            what=f"several processes compute together what one does: {part.what}",
            run=partial(judge_all, id=part.id),
            not_supported=part.not_supported or alone,
            timeout_s=_TIMEOUT_S,
        )


def why_alone(device: Device, ranks: int) -> str:
    """Return why so many processes can't share work on such devices here, "" where they can."""
    kind = device.torch_device.type
    if not distributed.is_available():
        return "this torch has no torch.distributed"
    try:
        backend = distributed.get_default_backend_for_device(device.torch_device)
    except ValueError:
        return f"torch.distributed has no process group for devices of type {kind!r}"
    if not distributed.is_backend_available(backend):
        return f"this torch has no {backend!r}, its process group for devices of type {kind!r}"
    count = num_devices(device)
    if count is None or count >= ranks:
        return ""
    return f"{ranks} processes need a device each, and there is {count} of type {kind!r}"


def num_devices(device: Device) -> int | None:
    """Return how many processes can have a device of this type; None for any number, which the host has."""
    if device.torch_device.type == "cpu":
        return None
    return int(torch.get_device_module(device.torch_device).device_count())


def judge_all(trial: Trial, *, id: str) -> None:
    """Run the case in all processes, and report what each of them measured and found."""
    # The case was collected for the usual number; this run may ask for more.
    if alone := why_alone(trial.device, trial.ranks):
        raise NotSupported(alone)
    base = trial.name.partition(":")[0]
    shares = trial.device.torch_device.type == "cpu"
    devices = [trial.name if shares else f"{base}:{rank}" for rank in range(trial.ranks)]
    case = CaseInfo(id=id, what="", timeout_s=CASE_TIMEOUT_S)
    factor = trial.timeout_factor
    report(trial, run_in_all(case, devices, suite=ranked.__name__, seed=trial.seed, timeout_factor=factor))


def report(trial: Trial, outcomes: list[Outcome]) -> None:
    """Report the outcomes of all ranks.

    If one is lost, the failures of the others follow from it and are only notes. What no rank supports is not
    supported, what all skip for one reason is skipped; what only some do not run is a failure of these.
    """
    for status, kind in (("not-supported", NotSupported), ("skip", Skip)):
        if all(outcome.status == status for outcome in outcomes):
            raise kind(outcomes[0].reason)
    lost = [rank for rank, outcome in enumerate(outcomes) if outcome.status in _LOST]
    for rank, outcome in enumerate(outcomes):
        trial.measurements += outcome.measurements
        trial.note(*(f"rank {rank}: {note}" for note in outcome.notes))
        if outcome.status == "pass":
            continue
        text = f"rank {rank}: {outcome.status}: {outcome.reason}"
        if lost and rank not in lost:
            trial.note(text)
        else:
            trial.fail(text, *([f"what rank {rank} told:\n{outcome.detail}"] if outcome.detail else []))
