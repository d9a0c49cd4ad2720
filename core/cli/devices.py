"""`core devices`: every installed device plugin and whether it can be used here; imports neither torch nor a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from core.cli.output import console, print_json, print_warnings
from core.device import PluginInfo
from core.host.probing import DeviceStatus

if TYPE_CHECKING:
    from rich.table import Table

    from core.host.probing import DeviceScan

_STYLES = {"available": "green", "unavailable": "dim", "blocked": "dim"}


def devices(
    context: typer.Context, as_json: bool = typer.Option(False, "--json", help="Print JSON (core.devices/1).")
) -> None:
    """List the device plugins installed, and whether each device can be used here."""
    # `main` starts and ends the scan, so the probes run while rich is imported.
    scan: DeviceScan = context.obj
    table = None if as_json else _table()
    statuses = scan.statuses()
    warnings = scan.warnings
    if table is None:
        print_json("core.devices/1", devices=[status_json(item) for item in statuses], warnings=list(warnings))
        return
    for status in statuses:
        table.add_row(*_cells(status))
    console().print(table)
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


def _table() -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("device", "plugin", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("count", justify="right")
    for column in ("reason", "to do"):
        table.add_column(column, overflow="fold")
    return table


def _cells(status: DeviceStatus) -> tuple[Any, ...]:
    from rich.text import Text

    # Text objects, since a reason may hold brackets that rich would read as markup.
    count = "?" if status.device_count is None else str(status.device_count)
    cells = (status.plugin.device, str(status.plugin), status.state, count, status.reason, status.hint)
    style = _STYLES.get(status.state, "red")
    return tuple(Text(cell, style=style if number == 2 else "") for number, cell in enumerate(cells))
