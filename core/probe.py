"""The answer of a device probe: can this device be used on this machine, and if not, why and what to do.

A probe runs in a subprocess before anything of torch is imported, so this module imports the standard library only.
One that crashes, ends its process or hangs there keeps `core` from opening the device in a process that matters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a `core.probes` function returns."""

    #: The device can very likely be opened.
    available: bool
    #: Usable devices, 0 when unavailable.
    device_count: int
    #: One sentence on what was found, given in both cases.
    reason: str
    #: The remedy when unavailable, else "".
    hint: str = ""
