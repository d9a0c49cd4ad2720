"""The worker that imports a plugin and opens its device, each for the first time in its process."""

from __future__ import annotations

import contextlib
import time


def answer(request: dict[str, str]) -> dict[str, object]:
    """Return what importing the plugin, and what opening the device, changed of torch's state, and how long it took."""
    import core.compilation.compile  # noqa: F401  # imports that every plugin needs do not count as this plugin's time
    from core.errors import CoreError
    from core.host.accelerators import installed_claims
    from core.host.loading import load_plugin
    from core.host.selection import select_device
    from core_conformance.runner.isolation import TorchState

    name = request["device"]
    (entry,) = installed_claims(name.partition(":")[0])
    before, start = TorchState.read(), time.perf_counter()
    try:
        load_plugin(entry.info)
    except CoreError as error:
        return {"problem": f"{type(error).__name__}: {error.found}"}
    imported_s = time.perf_counter() - start
    on_import, before, start = before.restore(), TorchState.read(), time.perf_counter()
    with contextlib.suppress(CoreError):  # another case reports this
        select_device(name)
    return {
        "on_import": on_import,
        "on_open": before.changes(),
        "imported_s": imported_s,
        "opened_s": time.perf_counter() - start,
    }
