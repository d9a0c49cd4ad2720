"""Where a run took place, as data: versions, driver, platform and what the device says it can do."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import InvalidRequirement, Requirement

from core._version import __version__
from core.device import Capabilities, Device, PluginInfo
from core_conformance.dtypes import dtype_name
from core_conformance.report.report import Environment

_PACKAGES = ("torch", "transformers", "triton", "numpy")
_TOLD_BY_KEYS = ("driver", "runtime", "version")


def environment(
    device: Device | None = None, plugin: PluginInfo | None = None, *, workers: int = 1, threads: int = 1
) -> Environment:
    """Return what a report says about the place of a run; it raises nothing.

    device: None where it did not open. plugin: None takes the device's. workers: processes. threads: of torch in each.
    """
    plugin = device.plugin if plugin is None and device is not None else plugin
    return Environment(
        device_name="" if device is None else device.capabilities.device_name,
        capabilities={} if device is None else capabilities_json(device.capabilities),
        versions=_versions(plugin),
        driver=_driver({} if device is None else device.capabilities.extra),
        platform=f"{platform.platform()}, {platform.python_implementation()}",
        workers=workers,
        threads=threads,
    )


def capabilities_json(capabilities: Capabilities) -> dict[str, Any]:
    """Return what a device can do as JSON-ready values; dtypes by short name, in order of name."""
    return {
        "device_name": capabilities.device_name,
        "dtypes": sorted(map(dtype_name, capabilities.dtypes)),
        "modes": list(capabilities.modes),
        "fp64": capabilities.fp64,
        "deterministic": capabilities.deterministic,
        "update": capabilities.update,
        "extra": {str(name): _ready(value) for name, value in capabilities.extra.items()},
        "unprofitable": {str(name): str(reason) for name, reason in capabilities.unprofitable.items()},
    }


def _ready(value: Any) -> Any:
    # `extra` is the vendor's: what its annotation promises is not checked anywhere.
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _versions(plugin: PluginInfo | None) -> dict[str, str | None]:
    """Return the versions that decide a result: of `core` and what it runs on, and of what the plugin requires."""
    found: dict[str, str | None] = {"core": __version__, "python": sys.version.split()[0]}
    names = dict.fromkeys((*_PACKAGES, *sorted(_required(plugin)))) if plugin is not None else dict.fromkeys(_PACKAGES)
    for name in names:
        try:
            found[name] = torch.__version__ if name == "torch" else version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _required(plugin: PluginInfo) -> Iterator[str]:
    """Yield what the plugin's distribution requires; of one that brings several devices, the extra of this one."""
    try:
        lines = requires(plugin.distribution) or []
    except PackageNotFoundError:
        return
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        by_extra = requirement.marker is not None and requirement.marker.evaluate({"extra": plugin.device})
        if (by_extra and not always) if plugin.in_tree else (always or by_extra):
            name = requirement.name.lower().replace("_", "-")
            if name != "core":
                yield name


def _driver(extra: Mapping[str, Any]) -> str:
    """Return what the plugin says of driver and runtime, and what this torch was built for."""
    told = [f"{name} {value}" for name, value in extra.items() if value and any(key in name for key in _TOLD_BY_KEYS)]
    built = [
        f"torch built for {name} {value}"
        for name, value in sorted(vars(torch.version).items())
        if isinstance(value, str) and not name.startswith("_") and name != "git_version"
    ]
    return ", ".join((*told, *built))
