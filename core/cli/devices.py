"""`core devices`: every installed device plugin and whether it can be used here; imports neither torch nor a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from core.cli.output import console, print_json, print_warnings
from core.cli.reports.entries import Entry, print_entries
from core.device import PluginInfo
from core.host.probing import DeviceStatus

if TYPE_CHECKING:
    from core.host.probing import DeviceScan


def devices(
    context: typer.Context, as_json: bool = typer.Option(False, "--json", help="Print JSON (core.devices/1).")
) -> None:
    """List the device plugins installed, and whether each device can be used here."""
    # `main` starts and ends the scan, so the probes run while typer is imported.
    scan: DeviceScan = context.obj
    statuses = scan.statuses()
    warnings = scan.warnings
    if as_json:
        print_json("core.devices/1", devices=[status_json(item) for item in statuses], warnings=list(warnings))
        return
    print_entries(console(), ("device", "state", "count", "plugin"), map(_entry, statuses))
    print_warnings(warnings)
    if not statuses:
        print_warnings(("no plugin is installed; core itself is not installed here: `pip install .` in its checkout",))


def status_json(status: DeviceStatus) -> dict[str, Any]:
    """Return one element of `devices` in core.devices/1."""
    return {
        "device": status.plugin.device,
        "plugin": plugin_json(status.plugin),
        "state": status.state,
        "device_count": status.device_count,
        "reason": status.reason,
        "hint": status.hint,
    }


def plugin_json(info: PluginInfo) -> dict[str, Any]:
    """Return the plugin object of core.devices/1 and core.doctor/1."""
    return {
        "distribution": info.distribution,
        "version": info.version,
        "entry_point": info.entry_point,
        "probe": info.probe_entry_point,
        "requires_core": info.requires_core,
        "in_tree": info.in_tree,
    }


def _entry(status: DeviceStatus) -> Entry:
    count = "?" if status.device_count is None else str(status.device_count)
    return Entry(
        cells=(status.plugin.device, status.state, count, str(status.plugin)),
        state=status.state,
        sentences=(status.reason, status.hint and f"to do: {status.hint}"),
    )
