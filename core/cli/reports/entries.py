"""Lists whose entries are a short line and sentences under it, which a table of 80 columns could not hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"available": "green", "pass": "green", "unavailable": "dim", "blocked": "dim", "skipped": "dim"}
_GAP = "  "


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry. cells: the line, cell by cell; sentences: wrapped by words; raw: lines printed as they are."""

    cells: tuple[str, ...]
    state: str
    sentences: Sequence[str] = ()
    raw: Sequence[str] = field(default=())


def print_entries(out: Console, columns: tuple[str, ...], entries: Iterable[Entry]) -> None:
    """Print a heading and the entries.

    columns: name of each cell; the one after the first holds the state, whose style says how good it is.
    """
    from rich.padding import Padding
    from rich.text import Text

    listed = tuple(entries)
    rows = [columns, *(entry.cells for entry in listed)]
    widths = [max(len(row[number]) for row in rows) for number in range(len(columns))]
    indent = widths[0] + len(_GAP)

    def line(cells: Sequence[str], state: str) -> Text:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return Text(_GAP).join([Text(padded[0]), Text(padded[1], style=state), *map(Text, padded[2:])])

    # Text objects, since a reason may hold brackets that rich would read as markup.
    out.print(line(columns, ""), style="bold")
    for entry in listed:
        out.print(line(entry.cells, _STYLES.get(entry.state, "red")))
        for sentence in entry.sentences:
            if sentence:
                out.print(Padding(Text(sentence), (0, 0, 0, indent), expand=False))
        for raw in entry.raw:
            out.print(Text(f"{' ' * indent}| {raw}"), soft_wrap=True)
