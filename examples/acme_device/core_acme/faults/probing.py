"""Faults of the probe; imports no torch, as the probe itself."""

from __future__ import annotations

from dataclasses import replace

from core.probe import Probe


def probe_lies(found: Probe) -> Probe:
    """Count a card that is not there."""
    return replace(found, device_count=found.device_count + 1) if found.available else found
