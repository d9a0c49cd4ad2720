"""What the tests of the suite share: one case run in this process."""

from __future__ import annotations

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case
from core_conformance.trial import NotSupported, Skip, Trial


def run_case(case: Case, device: Device, profile: ConformanceProfile | None = None, *, seed: int = 0) -> list[str]:
    """Run a case and return why it fails: what it reported, and what it raised, by type and text; [] for a pass."""
    opened = (device, ConformanceProfile() if profile is None else profile)
    trial = Trial(device.name, lambda: opened, seed)
    try:
        case.run(trial)
    except (NotSupported, Skip):
        return trial.failures
    except Exception as error:
        return [*trial.failures, f"{type(error).__name__}: {error}"]
    return trial.failures
