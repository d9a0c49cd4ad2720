"""The answer of a device probe: can this device be used on this machine, and if not, why and what to do.

A probe runs in a subprocess before anything of torch is imported, so this module imports the standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a `core.probes` function returns.

    available: the device can very likely be opened. device_count: usable devices, 0 when unavailable.
    reason: one sentence on what was found, given in both cases. hint: the remedy when unavailable, else "".
    """

    available: bool
    device_count: int
    reason: str
    hint: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)
