"""What the backend did with each graph that Dynamo handed it; strings and counts only, so it keeps no tensor alive."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from core.compilation.implementations import ORIGINAL_NODES

if TYPE_CHECKING:
    from core.compilation.implementations import OpChoice
    from core.compilation.rewrite.pass_report import PassReport

log = logging.getLogger("core.dynamo")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """One graph."""

    #: The function that Dynamo was compiling, `BertModel.forward`.
    name: str
    #: Its file and line.
    place: str
    num_nodes: int
    #: Why Dynamo ended the graph before the function's end; "" where it did not.
    graph_break: str
    #: Why the graph runs as Dynamo traced it; "" where `core` compiled it.
    original: str
    device: str
    lowering: str
    passes: tuple[PassReport, ...]
    ops: tuple[OpChoice, ...]
    #: Shapes that were lowered each by itself.
    num_shapes: int
    #: Shapes that were captured in graphs of the device.
    num_captured: int
    #: Calls of the compiled graph, those of the original left out.
    calls: int
    #: Calls of the graph as Dynamo traced it, by reason.
    originals: Mapping[str, int]
    #: What was done otherwise than asked or preferred, each with the reason.
    notes: tuple[str, ...]
    #: Seconds of passes and lowering.
    seconds: float

    @property
    def matched(self) -> dict[str, int]:
        """Sites that each pass rewrote."""
        return {each.name: each.matched for each in self.passes if each.matched}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendReport:
    """The graphs compiled since the start, `torch._dynamo.reset()` or a reset of the report."""

    graphs: tuple[GraphReport, ...]
    #: Where Dynamo broke graphs, each reason with its place, and how often.
    graph_breaks: Mapping[str, int]

    @property
    def matched(self) -> dict[str, int]:
        """Sites that each pass rewrote, over all graphs."""
        return dict(sum((Counter(graph.matched) for graph in self.graphs), Counter()))

    @property
    def originals(self) -> dict[str, int]:
        """Calls of graphs as Dynamo traced them, by reason."""
        return dict(sum((Counter(graph.originals) for graph in self.graphs), Counter()))

    @property
    def calls(self) -> int:
        """Calls of compiled graphs."""
        return sum(graph.calls for graph in self.graphs)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready values."""
        return {**asdict(self), "matched": self.matched, "originals": self.originals, "calls": self.calls}

    def __str__(self) -> str:
        """Return the report for a terminal."""
        breaks = sum(self.graph_breaks.values())
        lines = [f"{len(self.graphs)} graphs, {self.calls} calls of them, {breaks} graph breaks"]
        for graph in self.graphs:
            device = f", device {graph.device}" if graph.device else ""
            lines.append(f"  {graph.name} ({graph.place}): {graph.num_nodes} nodes{device}")
            if graph.original:
                lines.append(f"    runs as it was traced: {graph.original}")
            else:
                fired = ", ".join(f"{name} {count}" for name, count in graph.matched.items())
                lines.append(f"    passes: {fired or 'none matched'}")
                ops = Counter(f"{choice.op} -> {choice.implementation}" for choice in graph.ops)
                lines += [f"    {name}: {count}" for name, count in sorted(ops.items())]
                if any(choice.implementation == ORIGINAL_NODES for choice in graph.ops):
                    lines.append(f"    ({ORIGINAL_NODES}: torch's own op, left to lowering {graph.lowering})")
                captured = f", {graph.num_captured} captured" if graph.num_captured else ""
                lines.append(
                    f"    lowering {graph.lowering}: {graph.num_shapes} shapes{captured}, {graph.calls} calls; "
                    f"{graph.seconds:.1f} s to compile"
                )
            for why, count in graph.originals.items():
                lines.append(f"    ran as it was traced {count} times" + ("" if why == graph.original else f": {why}"))
            lines += [f"    undone: {each.name}: {each.error}" for each in graph.passes if each.error]
            lines += [f"    note: {note}" for note in graph.notes]
        lines += [f"  graph break, {count} times: {why}" for why, count in self.graph_breaks.items()]
        return "\n".join(lines)


@dataclass(slots=True)
class GraphAccount:
    """What has happened to one graph so far."""

    name: str
    place: str
    num_nodes: int
    graph_break: str = ""
    original: str = ""
    device: str = ""
    lowering: str = ""
    passes: tuple[PassReport, ...] = ()
    ops: tuple[OpChoice, ...] = ()
    num_shapes: int = 0
    num_captured: int = 0
    calls: int = 0
    originals: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, note: str) -> None:
        """Log and keep a note, once."""
        if note not in self.notes:
            log.warning("%s: %s", self.name, note)
            self.notes.append(note)

    def report(self) -> GraphReport:
        """Return the account as it is now."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return GraphReport(**{**values, "originals": dict(self.originals), "notes": tuple(self.notes)})


class Accounts:
    """The accounts of all graphs, and the graph breaks that Dynamo noted."""

    def __init__(self) -> None:
        self._graphs: list[GraphAccount] = []
        self._breaks: Counter[str] = Counter()
        self._told: set[str] = set()

    def add(self, account: GraphAccount) -> None:
        """Keep the account of one more graph."""
        self._graphs.append(account)

    def count_break(self, why: str) -> None:
        """Count a graph break, and log it once."""
        if why not in self._breaks:
            log.info("graph break: %s", why)
        self._breaks[why] += 1

    def tell_original(self, account: GraphAccount, why: str) -> None:
        """Log, once for each reason, that a graph runs as Dynamo traced it."""
        if why not in self._told:
            self._told.add(why)
            log.warning("%s runs as it was traced: %s", account.name, why)

    def reset(self) -> None:
        """Forget all graphs; those in use go on, and are told no more."""
        self._graphs.clear()
        self._breaks.clear()
        self._told.clear()

    def report(self) -> BackendReport:
        """Return what was done so far."""
        return BackendReport(
            graphs=tuple(account.report() for account in self._graphs), graph_breaks=dict(self._breaks)
        )
