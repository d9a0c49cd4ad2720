"""A rank's share of a case in several processes, and how a rank joins the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import distributed

from core.engine.models.distributed import Processes, initialize
from core_conformance.trial import Trial

GROUP_TIMEOUT_S = 80.0
"""How long a collective waits for the other processes. A third of a case's time-out: the waiting process still reports
in time, so only the process that hangs gives no answer."""
CASE_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What every rank runs of a case; the process that starts the ranks lists the same ones."""

    #: `area/processes/…`.
    id: str
    #: What a pass shows, one line.
    what: str
    run: Callable[[Trial, Processes], None]
    #: Why the device is excused by its own declaration; "" for cases that run.
    not_supported: str = ""


def joined(trial: Trial) -> Processes:
    """Join the process group that torch has for such devices, and return this process's place in it."""
    backend = distributed.get_default_backend_for_device(trial.device.torch_device)
    return initialize(backend, timeout_s=GROUP_TIMEOUT_S * trial.timeout_factor)
