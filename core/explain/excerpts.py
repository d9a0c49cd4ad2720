"""The lines of the model's code that a page opens: excerpts of source files, each held once."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.explain.nodes import NodeRecord

_AROUND = 3
_APART = 2 * _AROUND + 1
"""Lines further apart than this are shown in two excerpts."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some lines of a file, with those that a site or a node comes from marked."""

    id: str
    #: File without its folder, and the marked lines: `modeling.py:60-65`.
    title: str
    path: Path
    #: Number (from 1), text and whether it is marked, of each line.
    lines: tuple[tuple[int, str, bool], ...]


class Excerpts:
    """The excerpts of one page; equal ones are one. Code that is in no file, or cannot be read, has none."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, tuple[int, ...]], Excerpt | None] = {}

    def of(self, nodes: Iterable[NodeRecord]) -> list[Excerpt]:
        """Return the excerpts that show the lines of these nodes, in the order of files and lines."""
        numbers: dict[str, set[int]] = {}
        for node in nodes:
            if node.file:
                numbers.setdefault(node.file, set()).add(node.lineno)
        runs = ((file, run) for file, found in numbers.items() for run in _runs(sorted(found)))
        return [excerpt for file, run in runs if (excerpt := self._excerpt(file, run)) is not None]

    def id_of(self, node: NodeRecord) -> str:
        """Return the id of the excerpt that shows a node's line; "" for none."""
        return next((excerpt.id for excerpt in self.of([node])), "")

    def listed(self) -> list[Excerpt]:
        """Return all excerpts asked for so far."""
        return [excerpt for excerpt in self._found.values() if excerpt is not None]

    def _excerpt(self, file: str, marked: tuple[int, ...]) -> Excerpt | None:
        if (file, marked) not in self._found:
            self._found[file, marked] = _read(file, marked, f"e{len(self._found)}")
        return self._found[file, marked]


def _read(file: str, marked: tuple[int, ...], name: str) -> Excerpt | None:
    lines = linecache.getlines(file)
    first, last = marked[0], marked[-1]
    if not 1 <= first <= last <= len(lines):
        return None
    shown = range(max(first - _AROUND, 1), min(last + _AROUND, len(lines)) + 1)
    path = Path(file).absolute()
    return Excerpt(
        id=name,
        title=f"{path.name}:{first}" + (f"-{last}" if last > first else ""),
        path=path,
        lines=tuple((number, lines[number - 1].rstrip(), number in marked) for number in shown),
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers in runs of neighbours."""
    run: list[int] = []
    for number in numbers:
        if run and number - run[-1] > _APART:
            yield tuple(run)
            run = []
        run.append(number)
    if run:
        yield tuple(run)
