"""Area graphs: what a `GraphBackend` promises, tried on the device's own by hand. calls.py tries whole programs."""

from __future__ import annotations

from collections.abc import Iterable

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case
from core_conformance.cases import graph_effects, graph_failures, graph_many, graph_memory, graph_replay, graph_threads
from core_conformance.cases.graph_promises import cases_of

PROMISES = (
    *graph_replay.PROMISES,
    *graph_effects.PROMISES,
    *graph_failures.PROMISES,
    *graph_threads.PROMISES,
    *graph_memory.PROMISES,
    *graph_many.PROMISES,
)


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield the cases about graph backends."""
    return cases_of(PROMISES, device)
