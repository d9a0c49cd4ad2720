"""Whether an Acme device is here; imports no torch, so that listing devices stays quick."""

from __future__ import annotations

import os

from core.probe import Probe

from core_acme.faults import planted

NUM_DEVICES_VARIABLE = "ACME_NUM_DEVICES"


def probe() -> Probe:
    """Report the simulated device, or its absence when `ACME_NUM_DEVICES` is 0."""
    return planted("probe", _look())


def _look() -> Probe:
    value = os.environ.get(NUM_DEVICES_VARIABLE, "1")
    if value == "0":
        return Probe(
            available=False,
            device_count=0,
            reason=f"{NUM_DEVICES_VARIABLE} is 0: the simulated device is unplugged",
            hint=f"unset {NUM_DEVICES_VARIABLE}",
        )
    if value != "1":
        return Probe(
            available=False,
            device_count=0,
            reason=f"{NUM_DEVICES_VARIABLE} is {value!r}, which is neither 0 nor 1",
            hint=f"set {NUM_DEVICES_VARIABLE} to 0 or 1, or unset it",
        )
    return Probe(available=True, device_count=1, reason="one simulated Acme A1 on this machine's CPU")
