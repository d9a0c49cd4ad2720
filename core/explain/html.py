"""An explanation as one HTML page: what the template core/assets/explain.html.jinja shows, laid out by phase and layer.

The page holds its style and script and loads nothing. All text is escaped by the template engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

from core.compilation.implementations import ORIGINAL_NODES, REFERENCE
from core.explain.excerpts import Excerpts
from core.explain.layer_errors import cell_text, layer_errors
from core.explain.layers import OUTSIDE, compact, layer_kinds, layer_of, ordered_ops
from core.explain.text import (
    NO_IMPLEMENTATION,
    calls_text,
    header,
    idle_lines,
    is_alarm,
    note,
    num_calls,
    op_groups,
    phase_summary,
    stage_summary,
    telling,
)

if TYPE_CHECKING:
    from core.explain.explanation import Explanation, PhaseExplanation, StageExplanation
    from core.explain.nodes import NodeRecord

_GOLDEN_ANGLE = 137.5
_INLINED = (REFERENCE, ORIGINAL_NODES)


def to_html(explanation: Explanation) -> str:
    """Return one page that needs nothing else: neither files nor a network."""
    import jinja2

    source = files("core").joinpath("assets", "explain.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    stages = [(phase, stage) for phase in explanation.phases for stage in phase.stages]
    names = list(dict.fromkeys(report.name for _, stage in stages for report in stage.passes))
    excerpts = Excerpts()
    return environment.from_string(source).render(
        title=next(iter(explanation.model.values()), "graphs"),
        device=explanation.device,
        facts=header(explanation),
        errors=None if explanation.quantization is None else layer_errors(explanation.quantization),
        error_text=cell_text,
        hues=[round(index * _GOLDEN_ANGLE) % 360 for index in range(len(names))],
        phases=[_Stage(*both, f"p{number}", names, excerpts).view() for number, both in enumerate(stages)],
        excerpts=excerpts,
    )


@dataclass(slots=True)
class _Row:
    """One node of one graph, as a line of the page."""

    id: str
    node: NodeRecord
    #: Changes that build on one another share a group; -1 for none.
    group: int
    #: Index of the pass that removed or made the node; -1 for none.
    pass_index: int
    #: Pass and reason of each near-miss that is told at this node.
    misses: Sequence[tuple[str, str]] = ()


@dataclass(slots=True)
class _Section:
    """One layer, or the nodes between two: its rows before and after, grouped by module."""

    id: str
    title: str
    layer: str
    before: list[_Row] = field(default_factory=list)
    after: list[_Row] = field(default_factory=list)

    def view(self) -> dict[str, Any]:
        rows = (*self.before, *self.after)
        by_pass = Counter(row.pass_index for row in rows if row.pass_index >= 0)
        return {
            "id": self.id,
            "title": self.title,
            "num_before": num_calls([row.node for row in self.before]),
            "num_after": num_calls([row.node for row in self.after]),
            "touched": sorted(by_pass),
            "num_misses": sum(len(row.misses) for row in rows),
            "columns": [("before", self._runs(self.before)), ("after", self._runs(self.after))],
        }

    def _runs(self, rows: Iterable[_Row]) -> list[tuple[str, list[_Row]]]:
        return [(name, list(run)) for name, run in groupby(rows, key=lambda row: self._module(row.node.path))]

    def _module(self, path: str) -> str:
        if not self.layer:
            return path or "(no module)"
        return path[len(self.layer) + 1 :].partition(".")[0] or "(the layer itself)"


class _Stage:
    """The template's data for one stage of one phase."""

    def __init__(
        self, phase: PhaseExplanation, stage: StageExplanation, prefix: str, names: Sequence[str], excerpts: Excerpts
    ) -> None:
        self._phase = phase
        self._stage = stage
        self._prefix = prefix
        self._excerpts = excerpts
        self._pass_index = {name: index for index, name in enumerate(names)}
        self._before = {node.name: f"{prefix}b{index}" for index, node in enumerate(stage.before)}
        self._after = {node.name: f"{prefix}a{index}" for index, node in enumerate(stage.after)}
        self._sections = self._lay_out()
        self._section_ids = {section.layer or OUTSIDE: section.id for section in reversed(self._sections)}

    def view(self) -> dict[str, Any]:
        phase, stage = self._phase, self._stage
        kinds = layer_kinds(stage.layers)
        is_last = stage is phase.stages[-1]
        return {
            "id": self._prefix,
            "name": phase.phase if len(phase.stages) == 1 else f"{phase.phase}, {stage.stage}",
            "summary": (phase_summary(phase), stage_summary(stage)),
            "passes": [
                {"index": self._pass_index[report.name], "report": report, "note": note(report)}
                | {"alarm": is_alarm(report)}
                | {"sites": self._sites(report.name)}
                for report in telling(stage)
            ],
            "num_passes": len(stage.passes),
            "idle": list(idle_lines(stage)),
            "layers": [(name, _short(name), self._section_ids.get(name, "")) for name in stage.layers],
            "matrix": list(self._matrix()),
            "kinds": [kind.name for kind in kinds],
            "op_counts": [(name, [kind.counts(name) for kind in kinds]) for name in ordered_ops(kinds)],
            "ops": [
                {"op": op, "implementation": implementation, "refused": refused}
                | {"none": "" if refused or implementation not in _INLINED else NO_IMPLEMENTATION}
                | {"num_calls": calls_text(nodes, self._after.keys())}
                | {"calls": [(name, self._after.get(name, "")) for name in nodes]}
                for (op, implementation, refused), nodes in (op_groups(phase) if is_last else {}).items()
            ],
            "misses": [
                {"index": self._pass_index[group.pass_name], "group": group, "sites": compact(group.sites)}
                | {
                    "each": list(
                        zip(group.sites, group.nodes, map(self._link, group.nodes), group.reasons, strict=True)
                    )
                }
                for group in stage.near_misses
            ],
            "inputs": list(self._inputs()),
            "sections": [section.view() for section in self._sections],
        }

    def _inputs(self) -> Iterator[_Row]:
        """Yield the placeholders, those that passes have added last."""
        yield from (_Row(self._before[node.name], node, -1, -1) for node in self._stage.before if _is_input(node))
        for node in self._stage.after:
            if _is_input(node) and node.change >= 0:
                group = self._stage.changes[node.change].group
                yield _Row(self._after[node.name], node, group, self._pass_index[node.by])

    def _link(self, name: str) -> str:
        return self._before.get(name) or self._after.get(name, "")

    def _sites(self, name: str) -> list[dict[str, Any]]:
        """Return each site of a pass: its nodes before and after, with links to those that both graphs still have."""
        return [
            {
                "id": f"{self._prefix}c{change.index}",
                "name": change.site,
                "columns": [
                    ("before", [(node, self._before.get(node.name, "")) for node in change.before]),
                    ("after", [(node, self._after.get(node.name, "")) for node in change.after]),
                ],
                "sources": self._excerpts.of(change.before or change.after),
            }
            for change in self._stage.changes
            if change.pass_name == name
        ]

    def _matrix(self) -> Iterator[tuple[int, str, list[tuple[int, int, bool]]]]:
        """Yield for each telling pass its matches and near-misses by layer, and whether they are unlike most'."""
        for report in telling(self._stage):
            counts = [
                (layer.matched.get(report.name, 0), layer.missed.get(report.name, 0))
                for layer in self._stage.layers.values()
            ]
            ((usual, _),) = Counter(counts[1:] or counts).most_common(1)
            cells = [(*count, index > 0 and count != usual) for index, count in enumerate(counts)]
            yield self._pass_index[report.name], report.name, cells

    def _lay_out(self) -> list[_Section]:
        """Put the nodes of both graphs into sections in order of execution: layers, and what lies between them."""
        layers = [layer_of(node.path) for node in (*self._stage.before, *self._stage.after)]
        position = {layer: index for index, layer in enumerate(dict.fromkeys(filter(None, layers)))}
        sections: dict[tuple[int, bool], _Section] = {}
        misses: dict[str, list[tuple[str, str]]] = {}
        for report in self._stage.passes:
            for miss in report.near_misses:
                misses.setdefault(miss.node, []).append((report.name, miss.reason))
        groups = [change.group for change in self._stage.changes]
        for side, nodes, ids in (
            ("before", self._stage.before, self._before),
            ("after", self._stage.after, self._after),
        ):
            num_seen = 0
            for node in nodes:
                if not _is_input(node):
                    layer = layer_of(node.path)
                    num_seen = max(num_seen, position[layer] + 1) if layer else num_seen
                    key = (position[layer], True) if layer else (num_seen, False)
                    section = sections.setdefault(key, _Section("", _title(layer, num_seen, len(position)), layer))
                    # Show a near-miss once: in the graph before the passes if the node is there.
                    told = misses.pop(node.name, ())
                    group = groups[node.change] if node.change >= 0 else -1
                    row = _Row(ids[node.name], node, group, self._pass_index.get(node.by, -1), told)
                    getattr(section, side).append(row)
        ordered = [sections[key] for key in sorted(sections)]
        for index, section in enumerate(ordered):
            section.id = f"{self._prefix}s{index}"
        return ordered


def _is_input(node: NodeRecord) -> bool:
    return not node.op and not node.text.startswith("output ")


def _title(layer: str, num_seen: int, num_layers: int) -> str:
    if layer:
        return layer
    if num_layers == 0:
        return "all nodes"
    return "before the layers" if num_seen == 0 else "after the layers" if num_seen == num_layers else "between layers"


def _short(layer: str) -> str:
    return layer.rpartition(".")[2] if layer != OUTSIDE else "outside"
