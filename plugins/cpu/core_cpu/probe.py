"""The probe of device "cpu": what `core devices` shows without importing torch."""

from __future__ import annotations

import platform
from pathlib import Path

from core.probe import Probe


def probe() -> Probe:
    """Report the processor, which is always there."""
    return Probe(available=True, device_count=1, reason=product_name())


def product_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as its vendor writes it, or the architecture where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
