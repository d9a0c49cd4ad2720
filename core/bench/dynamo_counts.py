"""Counts what torch.compile did while a subject was measured, by Dynamo's counters: graphs, breaks, recompiles."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

_NUM_REASONS, _MOST_REASON = 5, 300
_HINTS = re.compile(r"(?: Hint: .*?)+(?= Developer debug context|$)")


class Compiles:
    """What Dynamo counts during one subject's calls, before and after it is warm; enter it around these calls.

    A plain class, since its entry and exit are inside the measured time.
    """

    def __init__(self) -> None:
        self._breaks: Counter[str] = Counter()
        self._graphs = 0
        self._warm_graphs: int | None = None

    def __enter__(self) -> None:
        counters = torch._dynamo.utils.counters
        self._graphs_before = counters["stats"]["unique_graphs"]
        self._num_breaks_before = sum(counters["graph_break"].values())
        self._breaks_before = Counter(counters["graph_break"]) if self._num_breaks_before else Counter[str]()

    def __exit__(self, *_: object) -> None:
        counters = torch._dynamo.utils.counters
        self._graphs += counters["stats"]["unique_graphs"] - self._graphs_before
        if sum(counters["graph_break"].values()) > self._num_breaks_before:
            self._breaks += Counter(counters["graph_break"]) - self._breaks_before

    def warm(self) -> None:
        """Mark the end of warm-up: whatever is compiled from here on is a recompile."""
        self._warm_graphs = self._graphs

    def to_json(self) -> dict[str, Any]:
        """Return the counts and the first reasons for graph breaks."""
        warm = self._graphs if self._warm_graphs is None else self._warm_graphs
        reasons = [_HINTS.sub("", " ".join(reason.split()))[:_MOST_REASON] for reason in self._breaks]
        return {
            "graphs": warm,
            "graph_breaks": self._breaks.total(),
            "break_reasons": reasons[:_NUM_REASONS],
            "recompiles": self._graphs - warm,
        }
