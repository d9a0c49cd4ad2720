"""Runs passes over samples, one after another as in a program, and keeps each pass's effect on each graph.

A sample is traced once per process, dtype and device, and walked once per list of passes: the cases of all passes share
that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core.common.passes.constants import Constants
from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Guards
from core.common.passes.results import PassResult
from core.compilation.implementations import implemented_ops, put_back_unimplemented
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewrite.stages import later_stages
from core.compilation.rewriting import bound_constants, device_passes
from core.compilation.trace.traced import ConstantSlot
from core.compilation.trace.tracing import trace
from core.device import Device
from core.engine.check.graphs import PhaseGraph
from core.verify.execution import bind, error_line
from core.verify.verify import Verification, verify
from core_conformance.cases.passes.attention_models import ATTENTION_MODELS
from core_conformance.cases.passes.many_models import WIDE_MODELS
from core_conformance.cases.passes.models import MODELS, Built, perturb
from core_conformance.cases.passes.recurrent_models import RECURRENT_MODELS

Tokens = tuple[int, int] | None


@dataclass(frozen=True)
class Sample:
    """A model to run passes over."""

    name: str
    #: Makes the model and its inputs by name, in fp32 on the host, the same each time.
    build: Callable[[], Built]
    #: Whether the pass that brought it must match in it.
    owed: bool = False


CORPUS: Mapping[str, Sample] = {
    name: Sample(name, build)
    for name, build in {**MODELS, **ATTENTION_MODELS, **RECURRENT_MODELS, **WIDE_MODELS}.items()
}


class CannotRun(Exception):
    """A sample does not run in eager mode, here or on this device; what passes make of it can't be judged."""


def traced(sample: Sample, dtype: torch.dtype, device: torch.device) -> PhaseGraph:
    """Build a sample in a dtype on a device, perturb constant weights, and trace it; raise `CannotRun` if it does not
    run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = sample.build()
    model = perturb(model).to(device=device, dtype=dtype)
    own = {name: cast(tensor, dtype).to(device) for name, tensor in inputs.items()}

    def call(**named: Tensor) -> Any:
        return model(*named.values())

    try:
        with torch.no_grad():
            deepcopy(model)(*own.values())
    except Exception as error:
        raise CannotRun(f"{sample.name} in {dtype}: {error_line(error)}") from error
    return PhaseGraph(phase=sample.name, traced=trace(call, own), examples=(own,), function=call)


@cache
def corpus_graph(name: str, dtype: torch.dtype, device: torch.device) -> PhaseGraph:
    """Return a traced sample of the corpus; take a `copied` graph to rewrite."""
    return traced(CORPUS[name], dtype, device)


def copied(graph: PhaseGraph) -> PhaseGraph:
    """Return the same trace on a graph of its own, to rewrite."""
    return replace(graph, traced=replace(graph.traced, module=Snapshot(graph.traced.module).module()))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating tensor in a dtype, any other tensor unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass
class Change:
    """One pass's effect on one graph: its report, the graph before and after, and the values of their placeholders."""

    sample: Sample
    dtype: torch.dtype
    declared: Pass
    report: PassReport
    before: fx.GraphModule
    after: fx.GraphModule
    #: The sample as traced, before any pass.
    graph: PhaseGraph
    constants: Constants

    @cached_property
    def verification(self) -> Verification:
        """The numbers of the graph after, judged by those of the graph before."""
        return verify(self.report, self.before, self.after, self.graph.values(), constants=self.constants)

    def held(self, module: fx.GraphModule) -> Constants:
        """Return the constants for one more run of a pass over a graph of the same placeholders."""
        slots = zip(module.graph.find_nodes(op="placeholder"), self.graph.traced.slots, strict=False)
        free = {node.name for node, slot in slots if not isinstance(slot, ConstantSlot)}
        values = bind(module, self.graph.values()[0], self.constants)
        return Constants({n: v for n, v in values.items() if isinstance(v, Tensor) and n not in free})


@dataclass
class Walk:
    """One sample under all passes."""

    sample: Sample
    #: By the pass's name.
    reports: dict[str, PassReport] = field(default_factory=dict)
    #: Changes of the passes that did or claim anything, by name.
    changes: dict[str, Change] = field(default_factory=dict)
    #: Why the walk ended early, "" where it did not.
    failed: str = ""

    def matched(self, name: str) -> int:
        """Return how many matches a pass claims here."""
        report = self.reports.get(name)
        return 0 if report is None else report.matched


class Bench:
    """The passes of a device over samples; everything is computed when first asked for, and kept."""

    def __init__(self, device: Device, passes: Sequence[Pass] | None = None) -> None:
        self.device = device
        self.passes = tuple(device_passes(device) if passes is None else passes)
        self._walks: dict[tuple[str, torch.dtype, Tokens], Walk] = {}
        self._own: dict[tuple[str, torch.dtype], PhaseGraph] = {}
        self.firings: dict[tuple[str, torch.dtype], Any] = {}

    def manager(self, passes: Sequence[Pass], **options: Any) -> PassManager:
        """Return the manager of some passes as this device runs them, those included that do not pay there."""
        names = {declared.name for declared in passes}
        return PassManager(
            passes,
            enable=[
                *(name for name in self.device.capabilities.unprofitable if name in names),
                *(declared.name for declared in passes if declared.traits.closes or declared.traits.on_request),
            ],
            capabilities=self.device.capabilities,
            implemented=frozenset(implementation.op for implementation in self.device.ops),
            **options,
        )

    def graph(self, sample: Sample, dtype: torch.dtype) -> PhaseGraph:
        """Return the sample traced, the same object each time."""
        if CORPUS.get(sample.name) is sample:
            return corpus_graph(sample.name, dtype, self.device.torch_device)
        if (sample.name, dtype) not in self._own:
            self._own[sample.name, dtype] = traced(sample, dtype, self.device.torch_device)
        return self._own[sample.name, dtype]

    def walk(self, sample: Sample, dtype: torch.dtype, tokens: Tokens = None) -> Walk:
        """Run every pass over a sample. tokens: how many the graph is said to serve."""
        key = (sample.name, dtype, tokens)
        if key not in self._walks:
            self._walks[key] = self._walk(sample, dtype, tokens, self.passes)
        return self._walks[key]

    def alone(self, declared: Pass, sample: Sample, dtype: torch.dtype) -> Walk:
        """Run one pass, after those that it is ordered after, and no other."""
        earlier, wanted = {declared.name}, {declared.name}
        while wanted:
            wanted = {n for p in self.passes if p.name in wanted for n in p.after} - earlier
            earlier |= wanted
        return self._walk(sample, dtype, tokens_for(declared), [p for p in self.passes if p.name in earlier])

    @torch.no_grad()
    def _walk(self, sample: Sample, dtype: torch.dtype, tokens: Tokens, passes: Sequence[Pass]) -> Walk:
        walk = Walk(sample)
        graph = self.graph(sample, dtype)
        module = copied(graph).traced.module
        constants = bound_constants(graph.traced)
        manager = self.manager(passes)
        by_name = {declared.name: declared for declared in manager.passes}

        def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
            walk.changes[report.name] = Change(
                sample, dtype, by_name[report.name], report, before, Snapshot(after).module(), graph, constants
            )

        try:
            reports = manager.run(module, tokens=tokens, constants=constants, check=check)
            options: dict[str, Any] = {"tokens": tokens, "constants": constants, "check": check}
            for staged in later_stages(
                manager.passes, module, lambda m: put_back_unimplemented(m, implemented_ops(self.device.ops))
            ):
                options |= {"form": staged.form, "refused": staged.refused}
                reports += manager.run(staged.module, staged.stage, **options)
        except Exception as error:
            walk.failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return walk
        walk.reports = {report.name: report for report in reports}
        return walk

    def again(self, change: Change, module: fx.GraphModule) -> tuple[PassReport, Change | None]:
        """Run a change's pass once more, alone, over a graph of the same placeholders, which it rewrites.

        The other passes keep their places in the order and do nothing.
        """
        declared, constants, found = change.declared, change.held(module), list[Change]()
        values = bind(module, change.graph.values()[0], change.constants)
        slots = tuple(ConstantSlot(value) for value in values.values())
        graph = replace(change.graph, traced=replace(change.graph.traced, module=module, slots=slots))

        def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
            done = Snapshot(after).module()
            found.append(Change(change.sample, change.dtype, declared, report, before, done, graph, constants))

        others = [_stand_in(other, declared.stage) for other in self.passes if other.name != declared.name]
        manager = self.manager([*others, replace(declared, expect=None)])
        with torch.no_grad():
            reports = manager.run(module, declared.stage, tokens=tokens_for(declared), constants=constants, check=check)
        report = next(report for report in reports if report.name == declared.name)
        return report, found[-1] if found else None


def _stand_in(declared: Pass, stage: Any) -> Pass:
    return replace(
        declared,
        find=None,
        run=lambda _: PassResult(matched=0),
        mechanism="graph",
        patterns=(),
        guards=Guards(),
        expect=None,
        stage=stage,
        traits=replace(declared.traits, form="v2", closes=False, requires=frozenset()),
    )


def tokens_for(declared: Pass) -> Tokens:
    """Return a number of tokens that a pass's guard lets through, as a range; None where it has none."""
    return None if declared.guards.tokens is None else (declared.guards.tokens[0], declared.guards.tokens[0])


_LAST: list[Bench] = []


def bench(device: Device) -> Bench:
    """Return the bench of a device; the last call's bench if the device is the same."""
    if not _LAST or _LAST[0].device is not device:
        _LAST[:] = [Bench(device)]
    return _LAST[0]
