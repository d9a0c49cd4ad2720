"""Selecting a device: the chosen plugin alone is imported, asked once, and resolved onto a frozen `Device`."""

from __future__ import annotations

import difflib
import logging
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from core.device import Device, DeviceParts, PluginInfo
from core.errors import (
    CoreError,
    DeviceUnavailableError,
    PluginConflictError,
    PluginError,
    PluginVersionError,
    UnknownDeviceError,
    UsageError,
)
from core.hookspecs import DeviceContext, OpenContext
from core.host import accelerators
from core.host.discovery import Discovery, PluginEntry, discover
from core.host.distributions.isolation import isolate
from core.host.loading import load_plugin
from core.host.parts import blamed
from core.host.plugin_metadata import AUTO
from core.host.probing import DeviceScan, DeviceStatus, require_harmless_probe, run_probe
from core.settings import Settings

if TYPE_CHECKING:
    import torch

    from core.common.conformance import ConformanceProfile
    from core.common.passes.declaration import Pass

logger = logging.getLogger(__name__)

# The one device name in the host: `auto` must end somewhere, and a processor is the device every machine has.
FALLBACK_DEVICE = "cpu"

_REQUEST = re.compile(r"(?P<name>[^:]+)(?::(?P<index>\d+))?")
_MAX_NAME = 100
_LIST_REMEDY = "`core devices` lists every installed plugin and its state"


def list_devices(*, settings: Settings | None = None) -> tuple[DeviceStatus, ...]:
    """List every installed device plugin and whether it can be used here, importing none of them.

    settings: what the environment asks for, unless given.
    """
    with DeviceScan(settings or Settings.from_environment(), ask_torch=True) as scan:
        return scan.statuses()


def select_device(
    name: str | Device | torch.device = AUTO, index: int = 0, *, settings: Settings | None = None
) -> Device:
    """Open a device and resolve all hooks of its plugin; a `Device` is returned as it is.

    A device asked for by name is opened, or the error names plugin, cause and remedy. "auto" chooses: the accelerator
    with the most devices, else the processor; `Device.reason` says why.

    - name: a device name, `name:index`, or "auto"; a `torch.device` stands for its type and index.
    - index: which device of that kind.

    Raises `UsageError` for anything else, and for an index that can't be.
    """
    if isinstance(name, Device):
        return name
    name = _named(name)
    settings = settings or Settings.from_environment()
    device, index = _parse(name, index)
    if device == AUTO:
        return _select_auto(index, settings)
    discovery = discover(settings)
    isolate(discovery.damaged, discovery.unread)
    info = _resolve_name(device, discovery, settings)
    require_harmless_probe(info, settings.probe_timeout_s)
    try:
        return _open(
            info, index, reason="; ".join(filter(None, ("asked for by name", accelerators.describe(info, settings))))
        )
    except (DeviceUnavailableError, PluginError) as error:
        _add_probe_hint(error, info, settings)
        raise


def check_name(name: str) -> None:
    """Raise the error of `select_device` for a name that no usable plugin has, importing none of them."""
    device, _ = _parse(name, 0)
    if device != AUTO:
        settings = Settings.from_environment()
        _resolve_name(device, discover(settings), settings)


def conformance_profile(device: Device) -> ConformanceProfile:
    """Return the declared limits of the plugin of `device` (hook core_conformance)."""
    from core.common.conformance import ConformanceProfile

    context = DeviceContext(plugin=device.plugin, parts=device.parts)
    profile: ConformanceProfile = load_plugin(device.plugin).call("core_conformance", context, ConformanceProfile())
    return profile


def _named(given: object) -> str:
    """Return the name in what was asked for; torch itself is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.device):
        return str(given)
    if not isinstance(given, str):
        raise UsageError(
            f"device {given!r}",
            found=type(given).__name__,
            remedy="pass a device name such as 'auto', a torch.device, or a Device from core.select_device",
        )
    return given


def _parse(name: str, index: int) -> tuple[str, int]:
    match = _REQUEST.fullmatch(name)
    if match is None or index < 0 or len(name) > _MAX_NAME:
        shown = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."
        raise UsageError(
            f"device {shown!r}, index {index}",
            found="not a device name with an optional index",
            remedy="write it like 'name' or 'name:1'; an index counts from 0",
        )
    if match["index"] is None:
        return match["name"], index
    if index not in (0, int(match["index"])):
        raise UsageError(
            f"device {name!r}, index {index}", found="two different indices", remedy="give the index in one place"
        )
    return match["name"], int(match["index"])


def _resolve_name(device: str, discovery: Discovery, settings: Settings) -> PluginInfo:
    """Return the one loadable plugin of that device name, or raise the error that says why there is none."""
    entries = accelerators.claims(device, discovery, settings)
    for entry in entries:
        if entry.verdict == "ready":
            return entry.info
    if not entries:
        raise _unknown(device, discovery)
    # A blocked entry comes last: any other entry says more about why there is no device.
    entry = min(entries, key=lambda item: item.verdict == "blocked")
    raise _refusal(entry)


def _refusal(entry: PluginEntry) -> CoreError:
    kinds: dict[str, type[CoreError]] = {
        "blocked": DeviceUnavailableError,
        "conflict": PluginConflictError,
        "incompatible": PluginVersionError,
    }
    kind = kinds.get(entry.verdict, PluginError)
    # A conflict names both claimants itself; naming one of them first would put the blame on it.
    found = entry.reason if entry.verdict == "conflict" else f"plugin {entry.info} is {entry.verdict}: {entry.reason}"
    return kind(f"device {entry.info.device!r}", found=found, remedy=entry.hint)


def _unknown(device: str, discovery: Discovery) -> UnknownDeviceError:
    known = sorted({entry.info.device for entry in discovery.entries})
    if not known:
        return UnknownDeviceError(
            f"device {device!r}",
            found="no plugin is installed, not even those that ship with core: core itself is not installed here",
            remedy="install core (`pip install .` in its checkout), which registers its plugins",
        )
    close = difflib.get_close_matches(device, known, n=1)
    suggestion = f"; did you mean {close[0]!r}?" if close else ""
    said, remedy = accelerators.said_by_torch(device, discovery)
    error = UnknownDeviceError(
        f"device {device!r}",
        found=f"no installed plugin has that name; known: {', '.join([*known, AUTO])}{suggestion}"
        + (f"; {said}" if said else ""),
        remedy=f"{remedy or 'choose a known device'}, or install the package that provides {device!r}; {_LIST_REMEDY}",
    )
    for each in discovery.unread:
        error.add_note(f"{device!r} may be a device of this one: {each}")
    return error


def _add_probe_hint(error: CoreError, info: PluginInfo, settings: Settings) -> None:
    """Tell what the probe says about a device that did not open, unless the error says the same."""
    if not info.probe_entry_point:
        return
    probe = run_probe(info, settings.probe_timeout_s).probe
    text = f"{error.found} {error.remedy}"
    parts = [part for part in (probe.reason, probe.hint) if part and part not in text]
    if parts:
        error.add_note(f"the probe of plugin {info} says: {'; '.join(parts)}")


def _select_auto(index: int, settings: Settings) -> Device:
    with DeviceScan(settings) as scan:
        isolate(scan.discovery.damaged, scan.discovery.unread)
        statuses = scan.statuses()
    accelerators = [status for status in statuses if status.plugin.device != FALLBACK_DEVICE]
    candidates = sorted(
        (status for status in accelerators if status.state == "available"),
        key=lambda status: (-(status.device_count or 0), status.plugin.device),
    )
    lost = [f"{s.plugin.device} ({s.state}: {s.reason})" for s in accelerators if s.state != "available"]
    for position, status in enumerate(candidates):
        try:
            device = _open(status.plugin, index, reason="")
        except CoreError as error:
            logger.warning(
                "auto: device %r did not open although its probe said available: %s", status.plugin.device, error
            )
            lost.append(f"{status.plugin.device} (said available, did not open: {error.found})")
            continue
        lost += [_outranked(other) for other in candidates[position + 1 :]]
        if len(accelerators) < len(statuses):
            lost.append(f"{FALLBACK_DEVICE} (an accelerator is preferred)")
        return _chosen(device, f"auto chose {device.name}: {status.reason}", lost)
    return _open_fallback(statuses, index, lost, scan.discovery)


def _open_fallback(statuses: tuple[DeviceStatus, ...], index: int, lost: list[str], discovery: Discovery) -> Device:
    fallback = [status for status in statuses if status.plugin.device == FALLBACK_DEVICE]
    for status in fallback:
        if status.state == "available":
            device = _open(status.plugin, index, reason="")
            generic = accelerators.left_to_name(discovery)
            lost += [generic] if generic else []
            return _chosen(device, f"auto chose {device.name}: no accelerator can be used", lost)
    reasons = [*lost, *(f"{s.plugin.device} ({s.state}: {s.reason})" for s in fallback)]
    raise DeviceUnavailableError(
        f"device {AUTO!r}",
        found="no device can be used: " + ("; ".join(reasons) or "no plugin is installed, so core itself is not"),
        remedy=f"allow or install the plugin of a device that is present; {_LIST_REMEDY}",
    )


def _outranked(status: DeviceStatus) -> str:
    count = "its number of devices is unknown" if status.device_count is None else f"{status.device_count} available"
    return f"{status.plugin.device} (available, but ranked lower: {count}; ties go by name)"


def _chosen(device: Device, choice: str, lost: list[str]) -> Device:
    reason = f"{choice}; not chosen: {'; '.join(lost)}" if lost else choice
    logger.info("%s", reason)
    return replace(device, reason=reason)


def _open(info: PluginInfo, index: int, *, reason: str) -> Device:
    """Import the plugin, open its device and resolve every hook."""
    loaded = load_plugin(info)
    parts: DeviceParts = loaded.call("core_open_device", OpenContext(plugin=info, index=index))
    # These import torch, which a plugin that can't be loaded need not wait for.
    from core.common.fakes import apply_fakes
    from core.common.graphs.backend import CallBackend
    from core.common.lowering import INLINE

    parts = blamed(info, parts)
    context = DeviceContext(plugin=info, parts=parts)
    lowerings = loaded.call("core_lowering", context, INLINE)
    graph_backend = loaded.call("core_graph_backend", context, CallBackend)
    passes = loaded.call("core_register_passes", context, ())
    ops = loaded.call("core_register_ops", context, ())
    declared = loaded.call("core_register_fakes", context, ())
    try:
        fakes = apply_fakes(declared)
    except Exception as error:
        raise loaded.error(f"a fake kernel it declares cannot be registered: {error}") from error
    return Device(
        name=info.device,
        plugin=info,
        parts=parts,
        lowerings=lowerings,
        graph_backend=graph_backend,
        passes=tuple(_owned(each, info) for each in passes),
        ops=tuple(ops),
        fakes=fakes,
        reason=reason,
    )


def _owned(declaration: Pass, info: PluginInfo) -> Pass:
    """Stamp a pass with the distribution it comes from, which reports name, unless the plugin stated an owner."""
    return replace(declaration, owner=info.distribution) if declaration.owner == "core" else declaration
