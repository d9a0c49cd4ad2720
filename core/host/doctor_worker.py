"""Opens one device for `core doctor`: `python -m core.host.doctor_worker <device>`; a crash stays in this process."""

from __future__ import annotations

import traceback

from core.host.workers.channel import serve


def answer(device_name: str) -> dict[str, object]:
    """Select the device and describe it, or say what went wrong."""
    from core.errors import CoreError, DeviceUnavailableError, error_json
    from core.host.selection import select_device

    try:
        device = select_device(device_name)
        return {"status": "pass", "device_name": device.capabilities.device_name}
    except CoreError as error:
        status = "unavailable" if isinstance(error, DeviceUnavailableError) else "fail"
        return {"status": status, "error": error_json(error), "traceback": traceback.format_exc()}


if __name__ == "__main__":
    serve(answer)
