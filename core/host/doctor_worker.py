"""The worker that opens one device for `core doctor`; a crash stays in its process."""

from __future__ import annotations

import traceback


def answer(request: dict[str, str]) -> dict[str, object]:
    """Select the `device` and describe it, or say what went wrong."""
    from core.errors import CoreError, DeviceUnavailableError, error_json
    from core.host.selection import select_device

    try:
        device = select_device(request["device"])
        return {"status": "pass", "device_name": device.capabilities.device_name}
    except CoreError as error:
        status = "unavailable" if isinstance(error, DeviceUnavailableError) else "fail"
        return {"status": status, "error": error_json(error), "traceback": traceback.format_exc()}
