"""Area graphs: what a `GraphBackend` promises, tried on the device's own by hand. cases/calls tries whole programs."""

from __future__ import annotations

from collections.abc import Iterable

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case
from core_conformance.cases.graphs import effects as graph_effects
from core_conformance.cases.graphs import failures as graph_failures
from core_conformance.cases.graphs import many as graph_many
from core_conformance.cases.graphs import memory as graph_memory
from core_conformance.cases.graphs import replay as graph_replay
from core_conformance.cases.graphs import threads as graph_threads
from core_conformance.cases.graphs.promises import cases_of

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
