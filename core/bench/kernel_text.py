"""The kernels of a phase for a terminal: one layer of each kind, then what belongs to none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_NAME = 56
_MOST_KERNELS = 2


def tables(profile: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what `rich` prints of a profile's JSON: a line of totals, one layer of each kind, the rest."""
    from rich.table import Table
    from rich.text import Text

    of = f"batch {profile['batch']}, context" if profile["phase"] == "decode" else "prompt of"
    yield (
        f"{profile['phase']}, {of} {profile['tokens']}: {profile['num_kernels']} {profile['source']}, "
        f"{profile['total_us']:.1f} us together (not captured, one by one), floor {profile['floor_us']:.1f} us "
        f"at {profile['bytes_per_s'] / 1e9:.0f} GB/s"
    )
    yield from (f"note: {note}" for note in profile["notes"])
    for layer in profile["layers"]:
        table = Table(box=None, pad_edge=False, title_justify="left")
        times = f" (x{layer['count']})" if layer["count"] > 1 else ""
        table.title = Text(f"\n{layer['name']}{times}: {layer['us']:.1f} us each, {layer['share']:.0%} of the step")
        for column in ("place", "op", "becomes", "kernels", "us", "share", "MB", "floor us", "at floor"):
            left = column in ("place", "op", "becomes", "kernels")
            table.add_column(column, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
        for row in layer["nodes"]:
            ordered = sorted(row["kernels"], key=lambda each: -each["us"])
            kernels = ", ".join(_kernel(kernel) for kernel in ordered[:_MOST_KERNELS])
            kernels += f" and {len(ordered) - _MOST_KERNELS} more" if len(ordered) > _MOST_KERNELS else ""
            part = row["floor_us"] / row["us"] if row["us"] else 0.0
            cells = (row["path"], row["op"], row["implementation"], kernels)
            numbers = (f"{row['us']:.1f}", f"{row['share']:.1%}", f"{row['bytes'] / 1e6:.2f}")
            table.add_row(*map(Text, cells), *numbers, f"{row['floor_us']:.1f}", f"{part:.0%}")
        yield table


def _kernel(kernel: Mapping[str, Any]) -> str:
    name = str(kernel["name"]).removeprefix("void ")
    name = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
    return name if kernel["count"] == 1 else f"{kernel['count']} x {name}"
