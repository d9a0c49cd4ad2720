"""The result of `core bisect`: one step per subject judged, one fault per subject that breaks the criterion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["pass", "op", "lowering", "model"]
Outcome = Literal["ok", "fault", "unjudged", "skipped", "nothing"]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A subject that breaks the numeric criterion, and its place."""

    phase: str
    kind: Kind
    #: Name of the pass, the implementation or the lowering.
    name: str
    #: The distribution that it comes from.
    owner: str
    #: The module path or a substitute; "" if no place could be named.
    site: str
    #: Nodes of the graph, the first of which is at fault; empty where no place could be named.
    nodes: tuple[str, ...]
    reason: str
    #: The error over its bound; infinite where no error was measured (a pass that raised, an index that differs).
    ratio: float
    #: The op of an implementation.
    op: str = ""

    def __str__(self) -> str:
        what = {
            "pass": f"pass {self.name!r} of {self.owner}",
            "op": f"implementation {self.name!r} of {self.op} by {self.owner}",
            "lowering": f"lowering {self.name!r} of {self.owner}",
            "model": f"the finished {self.name} on {self.owner}, against the model itself,",
        }[self.kind]
        more = f" to {self.nodes[-1]} ({len(self.nodes)} nodes)" if len(self.nodes) > 1 else ""
        node = f", node {self.nodes[0]}{more}" if self.nodes else ""
        site = f" at {self.site}{node}" if self.site else ""
        return f"{what} breaks {self.phase}{site}: {self.reason}"

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values, and the fault as one line."""
        return {**asdict(self), "text": str(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One subject that was judged: a pass, an implementation, a lowering or the whole model."""

    phase: str
    kind: Kind
    name: str
    owner: str
    #: "nothing": it ran, and nothing of it was judged. "unjudged": a part of it could not be judged.
    outcome: Outcome
    #: Sites that a pass rewrote, or calls of an op.
    matched: int = 0
    #: Number of these that were judged separately.
    num_sites: int = 0
    #: Number of these that only a run of the whole graph judges.
    num_whole: int = 0
    #: Tensors judged.
    num_values: int = 0
    #: The largest error over its bound.
    worst_ratio: float = 0.0
    #: The explanation of the outcome.
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bisection:
    """The outcome for all phases of a model on a device. faults: in the order in which they were met."""

    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]

    @property
    def num_values(self) -> int:
        """Tensors judged in all."""
        return sum(step.num_values for step in self.steps)

    @property
    def passed(self) -> bool:
        """True where something was judged and all of it is within the criterion."""
        return not self.faults and self.num_values > 0

    @property
    def open_questions(self) -> tuple[Step, ...]:
        """Steps of which something could not be judged."""
        return tuple(step for step in self.steps if step.outcome in ("unjudged", "nothing"))

    def headline(self) -> str:
        """Return the one line to read first."""
        if self.faults:
            more = f"; {len(self.faults) - 1} more below" if len(self.faults) > 1 else ""
            return f"FAULT: {self.faults[0]}{more}"
        if self.num_values == 0:
            return "NOTHING WAS JUDGED: no value was compared, so nothing is known"
        worst = max(step.worst_ratio for step in self.steps)
        rest = f"; {len(self.open_questions)} steps could not be judged in full" if self.open_questions else ""
        return f"within the criterion: {self.num_values} values judged, worst ratio {worst:.3g} (allowed: 1){rest}"

    def to_json(self) -> dict[str, Any]:
        """Return the document's fields as JSON-ready values."""
        return {
            "passed": self.passed,
            "headline": self.headline(),
            "num_values": self.num_values,
            "faults": [fault.to_json() for fault in self.faults],
            "steps": [asdict(step) for step in self.steps],
        }
