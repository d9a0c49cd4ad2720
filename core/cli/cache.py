"""`core cache`: what the compile cache holds, and clearing it; imports no torch."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from core.cli.output import console, print_json

if TYPE_CHECKING:
    from core.common.cache.store import Entry, Store


class Action(Enum):
    """What to do with the cache."""

    LIST = "list"
    CLEAR = "clear"


def cache(
    action: Action = typer.Argument(Action.LIST, help="list its entries, or clear it, kernels included."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON (core.cache/1)."),
) -> None:
    """Show or clear the compile cache: finished graphs, from which a later start needs no trace and no pass."""
    from core.common.cache.store import Store

    store = Store.of_user()
    if action is Action.LIST:
        _list(store, as_json=as_json)
        return
    count, num_bytes = store.clear()
    if as_json:
        print_json("core.cache/1", folder=str(store.folder.parent), removed=count, num_bytes=num_bytes)
    else:
        print(f"removed {count} entries, {num_bytes / 2**20:.1f} MiB, from {store.folder.parent}")


def _list(store: Store, *, as_json: bool) -> None:
    entries, kernels = store.entries(), store.kernel_bytes()
    rows = [_row(store, entry, entries) for entry in entries]
    if as_json:
        print_json("core.cache/1", folder=str(store.folder.parent), entries=rows, kernels=kernels)
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("entry", "model", "device", "MiB", "age"):
        table.add_column(column, no_wrap=True)
    table.add_column("differs from the latest of its model in", overflow="fold")
    for row in rows:
        size, age = f"{row['num_bytes'] / 2**20:.2f}", _age(row["age_s"])
        text = f"can't be used: {row['problem']}" if row["problem"] else "; ".join(row["differs"])
        table.add_row(row["key"][:12], row["model"], row["device"], size, age, text)
    out = console()
    out.print(table)
    kept = ", ".join(f"{name} {num_bytes / 2**20:.1f} MiB" for name, num_bytes in kernels.items() if num_bytes)
    out.print(f"{len(rows)} entries in {store.folder.parent}" + (f"; kernels: {kept}" if kept else ""))


def _row(store: Store, entry: Entry, entries: list[Entry]) -> dict[str, Any]:
    """Return one element of `entries` in core.cache/1."""
    return {
        "key": entry.key,
        "model": entry.model,
        "device": entry.device,
        "num_bytes": entry.num_bytes,
        "age_s": entry.age_s,
        "problem": entry.problem,
        "differs": _differs(store, entry, entries),
    }


def _differs(store: Store, entry: Entry, entries: list[Entry]) -> list[str]:
    """Return the factors in which an entry differs from the latest one of its model, by name; a few of them."""
    from core.common.cache.store import Damaged, differences, each_line

    latest = next((other for other in entries if other.model == entry.model and not other.problem), entry)
    if latest is entry or entry.problem:
        return []
    try:
        found = differences(store.factors(entry.key), store.factors(latest.key))
    except Damaged:  # cleared or replaced since it was listed
        return []
    return list(each_line([line.rsplit(": ", 1)[0] for line in found], most=3))


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
