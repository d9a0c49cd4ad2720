"""The simulated device of examples/acme_device as a `Device`, for tests of captures: it needs no plugin's metadata."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

from core_acme import plugin
from core_acme.memory import CARD

from core.common.lowering import INLINE
from core.device import Device
from core.hookspecs import OpenContext
from core.host.selection import select_device


def acme(**changes: Any) -> Device:
    """Return the recording device, without passes of its own, with some of its fields or capabilities replaced.

    What its hooks give, a fault planted by `ACME_FAULT` makes wrong.
    """
    device = select_device("cpu")
    parts = plugin.core_open_device(OpenContext(plugin=device.plugin, index=0))
    abilities = {name: changes.pop(name) for name in ("modes", "update", "keeps_strides") if name in changes}
    parts = replace(parts, capabilities=replace(parts.capabilities, **abilities))
    hooks = {"graph_backend": plugin.core_graph_backend(), "ops": plugin.core_register_ops()}
    device = replace(device, name="acme", parts=parts, lowerings=INLINE, passes=(), **hooks)
    return replace(device, **changes)


def graph_bytes() -> int:
    """Return what live recordings hold of the simulated card's memory."""
    gc.collect()  # tracebacks of earlier failures hold some
    return CARD.read().used_bytes
