"""Runs one device probe: `python -m core.host.probe_worker module:function`. Started by core/host/probing.py only."""

from __future__ import annotations

import sys
import traceback

from core.host.workers.channel import import_attribute, serve
from core.probe import Probe


def answer(reference: str) -> dict[str, object]:
    """Run the probe named by `reference`; return its fields, or what is wrong with it."""
    result: dict[str, object] = {}
    try:
        probe = import_attribute(reference)()  # type: ignore[operator]  # not callable: reported like any exception
        problem = _defect(probe)
        if problem:
            result["problem"] = problem
        else:
            result["probe"] = probe.to_json()
    except (Exception, SystemExit) as error:
        result["problem"] = f"raised {type(error).__name__}: {error}"
        traceback.print_exc()
    return {**result, "imported_torch": "torch" in sys.modules}


def _defect(probe: object) -> str:
    if not isinstance(probe, Probe):
        return f"returned {type(probe).__name__} instead of core.probe.Probe"
    fields = {"available": bool, "device_count": int, "reason": str, "hint": str}
    for name, kind in fields.items():
        value = getattr(probe, name)
        if not isinstance(value, kind):
            return f"returned a Probe whose {name} is {value!r} instead of {kind.__name__}"
    if probe.available != (probe.device_count > 0):
        return f"returned available={probe.available} with device_count={probe.device_count}"
    return ""


if __name__ == "__main__":
    serve(answer)
