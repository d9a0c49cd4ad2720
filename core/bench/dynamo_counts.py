"""What torch.compile did while a subject was measured, read off Dynamo's own counters: graphs, breaks, recompiles."""

from __future__ import annotations

import re
from typing import Any

import torch

_NUM_REASONS, _MOST_REASON = 5, 300
_HINTS = re.compile(r"(?: Hint: .*?)+(?= Developer debug context|$)")


class Compiles:
    """What Dynamo counts during one subject's calls, before and after it is warm."""

    def __init__(self) -> None:
        self._breaks: dict[str, int] = {}
        self._graphs = 0
        self._warm_graphs: int | None = None

    def counting(self) -> Any:
        """Enter around calls of the compiled function."""
        return _Counting(self)

    def warm(self) -> None:
        """Say that what is compiled from here on is compiled again."""
        self._warm_graphs = self._graphs

    def note(self, graphs: int, breaks: dict[str, int]) -> None:
        """Add what these calls did."""
        self._graphs += graphs
        for reason, count in breaks.items():
            self._breaks[reason] = self._breaks.get(reason, 0) + count

    def to_json(self) -> dict[str, Any]:
        """Return the counts and the first reasons for graph breaks."""
        warm = self._graphs if self._warm_graphs is None else self._warm_graphs
        reasons = [_HINTS.sub("", " ".join(reason.split()))[:_MOST_REASON] for reason in self._breaks]
        return {
            "graphs": warm,
            "graph_breaks": sum(self._breaks.values()),
            "break_reasons": reasons[:_NUM_REASONS],
            "recompiles": self._graphs - warm,
        }


class _Counting:
    """Reads Dynamo's counters before and after calls: a plain class, since it stands inside what is measured."""

    def __init__(self, stats: Compiles) -> None:
        self._stats = stats

    def __enter__(self) -> None:
        counters = torch._dynamo.utils.counters
        self._graphs = counters["stats"]["unique_graphs"]
        self._num_breaks = sum(counters["graph_break"].values())
        self._breaks = dict(counters["graph_break"]) if self._num_breaks else {}

    def __exit__(self, *_: object) -> None:
        counters = torch._dynamo.utils.counters
        graphs = counters["stats"]["unique_graphs"] - self._graphs
        broken = sum(counters["graph_break"].values()) - self._num_breaks
        if graphs or broken:
            found = counters["graph_break"]
            self._stats.note(graphs, {name: n - self._breaks.get(name, 0) for name, n in found.items()})
