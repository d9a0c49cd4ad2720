"""`explain`: what the passes do to a model's graphs on a device, site by site, and why they leave the rest alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core._version import __version__
from core.common.passes.pass_guards import Stage
from core.compilation.implementations import OpChoice, choose_implementations
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import Rewriter, bound_constants, device_passes
from core.compilation.trace.traced import TracedGraph
from core.device import Device
from core.explain.changes import Change, ChangeNotes, made_by, removed_by
from core.explain.layers import LayerKind, MissGroup, layers_of, miss_groups
from core.explain.nodes import NodeRecord, input_labels, input_texts, records

if TYPE_CHECKING:
    from torch import fx

    from core.engine.check.graphs import PhaseGraph
    from core.quantization.report import QuantizationReport

ALL_PASSES = PassSwitches()


@dataclass(frozen=True, kw_only=True)
class StageExplanation:
    """The effect of the passes of one stage on one graph."""

    stage: Stage
    before: tuple[NodeRecord, ...]
    after: tuple[NodeRecord, ...]
    #: A report of each enabled pass, in the order of execution.
    passes: tuple[PassReport, ...]
    #: The nodes that each pass removed and made, site by site.
    changes: tuple[Change, ...]

    @cached_property
    def layers(self) -> dict[str, LayerKind]:
        """Counts of ops, sites and near-misses of each layer."""
        return layers_of(self.before, self.after, self.passes)

    @cached_property
    def near_misses(self) -> tuple[MissGroup, ...]:
        """All near-misses, grouped by pass and reason."""
        return miss_groups(self.passes, frozenset(node.name for node in (*self.before, *self.after)))

    def to_json(self, *, nodes: bool = True) -> dict[str, object]:
        """Return the fields as JSON-ready values; nodes: the graphs too."""
        graphs = {"before": [asdict(n) for n in self.before], "after": [asdict(n) for n in self.after]}
        return {
            "stage": self.stage,
            "num_nodes": {"before": len(self.before), "after": len(self.after)},
            "passes": [report.to_json() for report in self.passes],
            "changes": [change.to_json(nodes=nodes) for change in self.changes],
            "layers": [
                {"layer": name, "before": dict(layer.before), "after": dict(layer.after)}
                | {"matched": dict(layer.matched), "near_misses": dict(layer.missed)}
                for name, layer in self.layers.items()
            ],
            "nodes": graphs if nodes else None,
        }


@dataclass(frozen=True, kw_only=True)
class PhaseExplanation:
    """The effect of all passes on one phase's graph."""

    phase: str
    #: The traced graph and, where an enabled pass needs it, the graph of ATen ops made from it.
    stages: tuple[StageExplanation, ...]
    #: The implementation that each canonical op got on the device.
    ops: tuple[OpChoice, ...]
    #: Shape of each input, as traced.
    inputs: Mapping[str, str]
    trace_s: float
    passes_s: float
    #: Time to turn the graph into ATen ops; 0 where no pass needs them.
    aten_s: float
    lower_s: float

    def to_json(self, *, nodes: bool = True) -> dict[str, object]:
        """Return the fields as JSON-ready values; nodes: the graphs too."""
        return {
            "phase": self.phase,
            "inputs": dict(self.inputs),
            "trace_s": self.trace_s,
            "passes_s": self.passes_s,
            "aten_s": self.aten_s,
            "lower_s": self.lower_s,
            "stages": [stage.to_json(nodes=nodes) for stage in self.stages],
            "ops": [asdict(choice) for choice in self.ops],
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the passes do to a model's graphs on a device; text.py shows it in a terminal, html.py as a page."""

    device: str
    product: str
    plugin: str
    versions: Mapping[str, str]
    switches: str
    #: Passes that the switches leave out.
    left_out: tuple[str, ...]
    phases: tuple[PhaseExplanation, ...]
    #: Facts about the model by name; the first is its title.
    model: Mapping[str, str] = field(default_factory=dict)
    #: How the model is quantised, with the error of each layer.
    quantization: QuantizationReport | None = None

    @property
    def undone(self) -> tuple[PassReport, ...]:
        """Reports of passes that failed, so that the model would run without them."""
        stages = (stage for phase in self.phases for stage in phase.stages)
        return tuple(report for stage in stages for report in stage.passes if report.error)

    def to_json(self, *, nodes: bool = True) -> dict[str, Any]:
        """Return the fields of core.explain/1 (docs/json.md) as JSON-ready values; nodes: the graphs too."""
        return {
            "device": {"name": self.device, "product": self.product, "plugin": self.plugin},
            "model": dict(self.model),
            "quantization": None if self.quantization is None else self.quantization.to_json(),
            "versions": dict(self.versions),
            "switches": self.switches,
            "left_out": list(self.left_out),
            "phases": [phase.to_json(nodes=nodes) for phase in self.phases],
        }


def explain(
    graphs: Sequence[PhaseGraph],
    device: Device,
    *,
    switches: PassSwitches = ALL_PASSES,
    strict: bool = False,
    model: Mapping[str, str] | None = None,
    quantization: QuantizationReport | None = None,
) -> Explanation:
    """Run the passes of a device on copies of the graphs and account for all they do; the graphs stay as they are.

    strict: as in `PassManager`. model, quantization: facts about the model, shown as they are. Raises `UsageError` for
    switches that name no pass, `PassError` when strict, and `LoweringError` where an implementation cannot say whether
    it applies.
    """
    rewriter = Rewriter(device, switches, strict=strict)
    chosen = {declared.name for declared in rewriter.manager.passes}
    return Explanation(
        device=device.name,
        product=device.capabilities.device_name,
        plugin=str(device.plugin),
        versions={"core": __version__, "torch": torch.__version__} | _transformers(),
        switches=str(switches),
        left_out=tuple(declared.name for declared in device_passes(device) if declared.name not in chosen),
        phases=tuple(_explain(graph, device, rewriter) for graph in graphs),
        model=dict(model or {}),
        quantization=quantization,
    )


def _explain(graph: PhaseGraph, device: Device, rewriter: Rewriter) -> PhaseExplanation:
    watched = _Watched(graph.traced)
    sizes = [graph.traced.sizes(example) for example in graph.examples]
    rewritten = rewriter.rewrite(_copy(graph.traced), sizes=sizes, watcher=watched)
    finished = Snapshot(rewritten.traced.module).module()
    start = time.perf_counter()
    ops = choose_implementations(finished, device.ops, constants=bound_constants(rewritten.traced))
    return PhaseExplanation(
        phase=graph.phase,
        stages=tuple(watched.stages),
        ops=ops,
        inputs={name: str(list(tensor.shape)) for name, tensor in graph.examples[0].items()},
        trace_s=graph.traced.elapsed_s,
        passes_s=sum(report.elapsed_ms for report in rewritten.passes) / 1e3,  # excludes the time of recording
        aten_s=rewritten.aten_s,
        lower_s=time.perf_counter() - start,
    )


def _copy(traced: TracedGraph) -> TracedGraph:
    return replace(traced, module=Snapshot(traced.module).module())


class _Watched:
    """Writes down what happens to a graph; a `core.compilation.rewriting.Watcher`."""

    def __init__(self, traced: TracedGraph) -> None:
        self.stages: list[StageExplanation] = []
        # Labels come from the trace itself: a copy no longer knows the origin of its inputs.
        self._labels, self._inputs = input_labels(traced), input_texts(traced)
        self._before: tuple[NodeRecord, ...] = ()
        self._notes = ChangeNotes(self._labels, self._inputs)
        self._module: fx.GraphModule | None = None  # that of the stage before

    def begin(self, stage: Stage, traced: TracedGraph) -> None:
        self._before = records(traced.module.graph, self._labels, self._inputs)
        self._notes = ChangeNotes(self._labels, self._inputs)

    def note(self, report: PassReport, before: Snapshot, after: fx.GraphModule) -> None:
        self._notes.note(report, before, after)

    def end(self, stage: Stage, traced: TracedGraph, reports: tuple[PassReport, ...]) -> None:
        previous, self._module = self._module, traced.module
        if traced.module is previous:  # no stage of its own: the graph stayed as it was
            last = self.stages[-1]
            self.stages[-1] = replace(last, passes=(*last.passes, *reports))
            return
        changes = self._notes.changes()
        after = records(traced.module.graph, self._labels, self._inputs)
        self.stages.append(
            StageExplanation(
                stage=stage,
                before=_attributed(self._before, removed_by(changes)),
                after=_attributed(after, made_by(changes)),
                passes=reports,
                changes=changes,
            )
        )


def _attributed(nodes: Sequence[NodeRecord], changed: Mapping[str, tuple[int, str]]) -> tuple[NodeRecord, ...]:
    """Return the nodes, each with the change and the pass that it is due to."""
    unchanged = (-1, "")
    found = ((node, *changed.get(node.name, unchanged)) for node in nodes)
    return tuple(replace(node, change=change, by=by) if change >= 0 else node for node, change, by in found)


def _transformers() -> dict[str, str]:
    try:
        return {"transformers": version("transformers")}
    except PackageNotFoundError:
        return {}
