"""`core cache`: what the compile cache holds, and clearing it; imports no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from core.cli.output import console, print_json

if TYPE_CHECKING:
    from core.compilation.cache.differences import Difference
    from core.compilation.cache.store import Entry, Store
    from core.compilation.cache.summary import Summary


class Action(Enum):
    """What to do with the cache."""

    LIST = "list"
    CLEAR = "clear"


def cache(
    action: Action = typer.Argument(Action.LIST, help="list its entries, or clear it, kernels included."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON (core.cache/1)."),
) -> None:
    """Show or clear the compile cache: finished graphs, from which a later start needs no trace and no pass."""
    from core.compilation.cache.store import Store

    store = Store.of_user()
    if action is Action.LIST:
        _list(store, as_json=as_json)
        return
    count, num_bytes = store.clear()
    if as_json:
        print_json("core.cache/1", folder=str(store.folder.parent), removed=count, num_bytes=num_bytes)
    else:
        print(f"removed {count} entries, {num_bytes / 2**20:.1f} MiB, from {store.folder.parent}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """An entry of the cache with the facts that the list shows."""

    entry: Entry
    #: Its summary; None if it can't be read.
    summary: Summary | None
    #: The factors in which it differs from the latest entry of its model.
    unlike: list[Difference]
    #: The same in a few words.
    unlike_text: str

    def to_json(self) -> dict[str, Any]:
        """Return one element of `entries` in core.cache/1."""
        from core.compilation.cache.differences import each_line

        return {
            "key": self.entry.name,
            "model": self.entry.model,
            "device": self.entry.device,
            "num_bytes": self.entry.num_bytes,
            "age_s": self.entry.age_s,
            "problem": self.entry.problem,
            "holds": None if self.summary is None else self.summary.to_json(),
            "differs": list(each_line([f"{each.group}: {each.name}" for each in self.unlike], most=3)),
        }

    def text(self) -> str:
        """Return its line in the table: the model and what that was compiled for, or why the entry can't be used."""
        name = ", ".join(each.rpartition(":")[2] for each in self.entry.model.split(", "))
        if self.summary is None:
            return "\n".join(filter(None, (name, f"can't be used: {self.entry.problem or 'it is gone'}")))
        about, made = self.summary.lines()
        unlike = f"unlike the latest: {self.unlike_text}" if self.unlike else ""
        return "\n".join(filter(None, ("; ".join(filter(None, (name, about))), made, unlike)))


def _list(store: Store, *, as_json: bool) -> None:
    entries, kernels = store.entries(), store.kernel_bytes()
    listed = [_look(store, entry, entries) for entry in entries]
    if as_json:
        rows = [each.to_json() for each in listed]
        print_json("core.cache/1", folder=str(store.folder.parent), entries=rows, kernels=kernels)
        return
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("entry", "device", "MiB", "age"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it holds", overflow="fold")
    for each in listed:
        size, age = f"{each.entry.num_bytes / 2**20:.2f}", _age(each.entry.age_s)
        table.add_row(each.entry.name[:12], each.entry.device, size, age, escape(each.text()))
    out = console()
    out.print(table)
    kept = ", ".join(f"{name} {num_bytes / 2**20:.1f} MiB" for name, num_bytes in kernels.items() if num_bytes)
    out.print(f"{len(listed)} entries in {store.folder.parent}" + (f"; kernels: {kept}" if kept else ""))


def _look(store: Store, entry: Entry, entries: list[Entry]) -> _Listed:
    """Return the facts about an entry, compared with the latest entry of its model among `entries`."""
    from core.compilation.cache.differences import brief, differences
    from core.compilation.cache.entry import Damaged

    latest = next((other for other in entries if other.model == entry.model and not other.problem), entry)
    summary, unlike, text = None, [], ""
    with suppress(Damaged):  # cleared or replaced since it was listed
        if not entry.problem:
            summary = store.summary(entry.name)
            unlike = differences(store.factors(entry.name), store.factors(latest.name))
            text = brief(unlike, store.places(entry.name), store.places(latest.name)) if unlike else ""
    return _Listed(entry=entry, summary=summary, unlike=unlike, unlike_text=text)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
