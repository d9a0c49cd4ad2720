"""`core passes`: the passes of a device in the order of execution, with owner, and whether each is enabled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from core.cli.completion import device_names
from core.cli.output import console, print_json
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass
    from core.common.passes.pass_guards import Guards
    from core.device import Device

_STAGES = ("torch", "functional", "aten")  # the stages in their order; within each, the passes' order


def passes(
    device: str | None = typer.Option(
        None, help="Device name; default: the passes that every device gets.", autocompletion=device_names
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON (core.passes/1)."),
    with_pass: list[str] = WITH_PASS,
    only_pass: list[str] = ONLY_PASS,
    no_pass: list[str] = NO_PASS,
    no_passes: bool = NO_PASSES,
    full: bool = typer.Option(False, "--full", help="Also show stage, mechanism, order, guards and identity."),
) -> None:
    """List the passes that rewrite a model's graphs, in the order of execution."""
    from core.host.selection import check_name, select_device

    switches = pass_switches(with_pass, only_pass, no_pass, no_passes)
    if device is not None:
        check_name(device)
    from core.common.passes.standard import COMMON_PASSES
    from core.compilation.rewrite.order import order
    from core.compilation.rewriting import device_passes
    from core.host.distributions.isolation import warnings

    resolved = None if device is None else select_device(device)
    known = COMMON_PASSES if resolved is None else device_passes(resolved)
    enabled = {declared.name for declared in switches.select(known)}
    ordered = sorted(order(known), key=lambda declared: _STAGES.index(declared.stage))
    # A pass that the device finds unprofitable also runs only on request, like one whose author says so.
    waiting = {declared.name: declared.traits.on_request for declared in ordered}
    waiting |= {} if resolved is None else resolved.capabilities.unprofitable
    enabled -= {name for name, reason in waiting.items() if reason and name not in switches.asked}
    rows = [pass_json(declared, declared.name in enabled, waiting[declared.name]) for declared in ordered]
    if as_json:
        chosen = None if resolved is None else {"name": resolved.name, "plugin": str(resolved.plugin)}
        print_json("core.passes/1", device=chosen, switches=str(switches), passes=rows, warnings=warnings())
    else:
        _print(rows, resolved, str(switches), full=full)


def pass_json(declared: Pass, enabled: bool, on_request: str) -> dict[str, Any]:
    """Return one element of `passes` in core.passes/1. on_request: why it waits to be asked for by name, "" if not."""
    return {
        "name": declared.name,
        "owner": declared.owner,
        "mechanism": declared.mechanism,
        "stage": declared.stage,
        "before": list(declared.before),
        "after": list(declared.after),
        "guards": guards_json(declared.guards),
        "params": dict(declared.params),
        "expect": "computed per graph" if callable(declared.expect) else declared.expect,
        "enabled": enabled,
        "on_request": on_request,
        "uuid": declared.uuid(),
        "does": declared.does,
    }


def guards_json(guards: Guards) -> dict[str, Any]:
    """Return the guards that refuse anything, by name."""
    dtypes, names = guards.dtypes, guards.implements
    found: dict[str, Any] = {
        "dtypes": None if dtypes is None else sorted(str(dtype).removeprefix("torch.") for dtype in dtypes),
        "min_rank": guards.min_rank or None,
        "capabilities": dict(guards.capabilities) or None,
        "world_size": None if guards.world_size == (1, None) else list(guards.world_size),
        "tokens": None if guards.tokens is None else list(guards.tokens),
        "constants": guards.constants or None,
        "implements": sorted(names) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _print(rows: Sequence[Mapping[str, Any]], device: Device | None, switches: str, *, full: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(f"{'every device' if device is None else str(device)}; {switches}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "pass", "owner", "what it does"):
        table.add_column(column, no_wrap=column == "pass", justify="left" if column else "right")
    for number, row in enumerate(rows, start=1):
        off = "" if row["enabled"] else "on request: " if row["on_request"] else "off: "
        does = f"{off}{row['does']}" + (f" Only if asked for: {row['on_request']}." if row["on_request"] else "")
        if full:
            does += f"\n{_details(row)}"
        cells = (str(number), row["name"], row["owner"], does)
        table.add_row(*map(Text, cells), style="" if row["enabled"] else "dim")
    out.print(table)
    if not rows:
        out.print("there are none")


def _details(row: Mapping[str, Any]) -> str:
    told = [f"stage {row['stage']}, mechanism {row['mechanism']}"]
    told += [f"{key} {', '.join(row[key])}" for key in ("after", "before") if row[key]]
    told += [f"{name} {_brief(value)}" for name, value in row["guards"].items()]
    told += [] if row["expect"] is None else [f"expects {row['expect']}"]
    return "; ".join([*told, f"uuid {row['uuid'][:8]}"])


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return ", ".join("any" if item is None else str(item) for item in value) if isinstance(value, list) else str(value)
