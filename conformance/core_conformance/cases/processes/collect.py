"""Area graphs, on two processes: a tensor-parallel forward gives the results of one process that holds the whole model.

Each process opens the device, joins the process group that torch has for such devices, and runs ranked.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import distributed

from core.common.conformance import ConformanceProfile
from core.device import Device, Mode
from core_conformance.case import Case, CaseInfo
from core_conformance.cases.processes import ranked
from core_conformance.cases.processes.pair import SIZE, run_in_both
from core_conformance.cases.processes.ranked import CASE_TIMEOUT_S, FORMS, case_id
from core_conformance.outcome import Outcome
from core_conformance.trial import Trial

_LOST = ("timeout", "crash")
# Two processes are started, one case takes `CASE_TIMEOUT_S`, and both may take turns on one core.
_TIMEOUT_S = 600.0


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield a case for each way to write collectives, in each mode."""
    alone = why_alone(device)
    for name, form in FORMS.items():
        for mode in form.modes:
            yield Case(
                id=case_id(name, mode),
                what=f"two processes compute together what one does: {form.what}",
                run=partial(judge_both, id=case_id(name, mode)),
                not_supported=_why_not(mode, device) or alone,
                timeout_s=_TIMEOUT_S,
            )


def _why_not(mode: Mode, device: Device) -> str:
    return "" if mode in (*device.capabilities.modes, "off") else f"the device does not declare mode {mode!r}"


def why_alone(device: Device) -> str:
    """Return why two processes can't share work on such devices here, "" where they can."""
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
    return "" if count >= SIZE else f"two processes need a device each, and there is {count} of type {kind!r}"


def num_devices(device: Device) -> int:
    """Return how many processes can have a device of this type: any number for the host."""
    if device.torch_device.type == "cpu":
        return SIZE
    return int(torch.get_device_module(device.torch_device).device_count())


def judge_both(trial: Trial, *, id: str) -> None:
    """Run the case in two processes, and report what each of them measured and found."""
    base = trial.name.partition(":")[0]
    shares = trial.device.torch_device.type == "cpu"
    devices = [trial.name if shares else f"{base}:{rank}" for rank in range(SIZE)]
    case = CaseInfo(id=id, what="", timeout_s=CASE_TIMEOUT_S)
    factor = trial.timeout_factor
    outcomes = run_in_both(case, devices, suite=ranked.__name__, seed=trial.seed, timeout_factor=factor)
    report(trial, outcomes)


def report(trial: Trial, outcomes: list[Outcome]) -> None:
    """Report the outcomes of all ranks. If one is lost, the failures of the others follow from it and are only
    notes."""
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
