"""Area graphs: the promises of `GraphBackend`, tested directly on the device's backend. cases/calls tests whole
programs."""

from __future__ import annotations

from collections.abc import Iterable

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case
from core_conformance.cases.graphs import effects, failures, many, memory, replay, threads
from core_conformance.cases.graphs.promises import cases_of

PROMISES = (
    *replay.PROMISES,
    *effects.PROMISES,
    *failures.PROMISES,
    *threads.PROMISES,
    *memory.PROMISES,
    *many.PROMISES,
)


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield the cases about graph backends."""
    return cases_of(PROMISES, device)
