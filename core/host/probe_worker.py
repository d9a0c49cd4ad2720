"""The worker that runs one device probe for core/host/probing.py; a crash stays in its process."""

from __future__ import annotations

import sys
import traceback
from dataclasses import asdict
from importlib.metadata import EntryPoint

from core.probe import Probe


def answer(request: dict[str, str]) -> dict[str, object]:
    """Run the probe that the entry point `probe` names; return its fields, or what is wrong with it."""
    result: dict[str, object] = {}
    try:
        probe = EntryPoint("", request["probe"], "").load()()
        problem = _defect(probe)
        if problem:
            result["problem"] = problem
        else:
            result["probe"] = asdict(probe)
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
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return f"returned a Probe whose {name} is {value!r} instead of {kind.__name__}"
    if probe.available != (probe.device_count > 0) or probe.device_count < 0:
        return f"returned available={probe.available} with device_count={probe.device_count}"
    return ""
