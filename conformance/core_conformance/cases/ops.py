"""Placeholder."""

from __future__ import annotations

from collections.abc import Iterable

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield the cases of this area."""
    return ()
