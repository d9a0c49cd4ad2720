"""Says once that an engine is still compiling, where nobody watches its progress."""

from __future__ import annotations

import logging
import time

from core.device import Device

log = logging.getLogger("core.engine")
_AFTER_S = 20.0


class Patience:
    """A `Progress` that logs a warning at the first step after 20 seconds: how far it is, and what starts at once."""

    def __init__(self, device: Device, lowering: str | None) -> None:
        """lowering: the one asked for; None for the device's own."""
        lowering = device.lowerings.resolve(lowering)[0]
        at_once = lowering != "inline" and "inline" in device.lowerings.available
        self._advice = ", and the lowering 'inline' (--lowering inline) starts at once" if at_once else ""
        self._start, self._told = time.monotonic(), False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take a step of the compile."""
        waited = time.monotonic() - self._start
        if self._told or waited < _AFTER_S:
            return
        self._told = True
        log.warning(
            "compiling for %.0f s so far: %s, %d of %d; later starts find it on disk%s",
            waited,
            what,
            done,
            total,
            self._advice,
        )
