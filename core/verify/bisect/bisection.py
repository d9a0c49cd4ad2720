"""Naming what breaks the numeric criterion: the first pass, op implementation or part of a lowering that does.

Each stage between a traced graph and a callable is judged against the stage before it, on real inputs: every pass,
every implementation of a canonical op, the lowering of the whole, and at last the callable against the model itself.
A stage at fault is undone, so that later stages are judged on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Stage
from core.compilation.implementations import choose_implementations, implemented_ops, put_back_unimplemented
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewrite.stages import later_stages
from core.compilation.rewriting import bound_constants
from core.errors import CoreError
from core.verify.bisect.lowered import judge_lowering
from core.verify.bisect.model import judge_model
from core.verify.bisect.ops import judge_ops, op_targets
from core.verify.bisect.report import Bisection, Fault, Outcome, Progress, Step
from core.verify.execution import bind
from core.verify.verify import Verification, failure, verify

if TYPE_CHECKING:
    from core.compilation.options import Verify
    from core.device import Device
    from core.engine.check.graphs import PhaseGraph

__all__ = ["Bisection", "Fault", "Step", "bisect", "injected"]


def bisect(
    graphs: Iterable[PhaseGraph],
    device: Device,
    passes: Sequence[Pass],
    *,
    level: Verify = "full",
    lowering: str | None = None,
    asked: Sequence[str] = (),
    progress: Progress = lambda what: None,
) -> Bisection:
    """Judge every stage of every phase and name what is at fault; the graphs are rewritten in place.

    - passes: what would run on this device, not yet ordered.
    - level: "full" judges every site on every set of examples, "sample" a third of the sites on the first set.
    - lowering: of the device, None for its default.
    - asked: passes to run although the device finds them unprofitable.
    - progress: called with the name of the stage under judgement.

    Raises `CoreError` for a question that can't be asked, such as a lowering that the device does not have.
    """
    implemented = implemented_ops(device.ops)
    manager = PassManager(passes, enable=asked, capabilities=device.capabilities, implemented=implemented)
    name, _ = device.lowerings.resolve(lowering)
    steps: list[Step] = []
    faults: list[Fault] = []
    for graph in graphs:
        phase = _Phase(graph, device, manager, level, name, progress)
        phase.run()
        steps += phase.steps
        faults += phase.faults
    return Bisection(steps=tuple(steps), faults=tuple(faults))


def injected(passes: Sequence[Pass], wrong: Pass) -> tuple[Pass, ...]:
    """Return the passes with a wrong one instead of the pass of that name, or after all others."""
    return tuple({**{declared.name: declared for declared in passes}, wrong.name: wrong}.values())


class _Phase:
    """The stages of one phase."""

    def __init__(
        self,
        graph: PhaseGraph,
        device: Device,
        manager: PassManager,
        level: Verify,
        lowering: str,
        progress: Progress,
    ) -> None:
        self.graph, self.device, self.manager, self.level = graph, device, manager, level
        self.lowering, self.progress = lowering, progress
        self.module = graph.traced.module
        self.inputs = graph.values() if level == "full" else graph.values()[:1]
        self.steps: list[Step] = []
        self.faults: list[Fault] = []
        self.verifications: dict[str, Verification] = {}
        self.constants = bound_constants(graph.traced)

    def run(self) -> None:
        original = Snapshot(self.module).module()
        self._passes()
        module = Snapshot(self.module).module()
        choices = choose_implementations(module, self.device.ops, constants=self.constants)
        inputs = [list(bind(module, values, self.constants).values()) for values in self.inputs]
        self.progress(f"{self.graph.phase}: {len(choices)} canonical ops")
        owner, sample = self.device.plugin.distribution, self.level == "sample"
        found = judge_ops(self.graph.phase, module, choices, self.device.ops, inputs, owner=owner, sample=sample)
        self._tell(*found)
        self.progress(f"{self.graph.phase}: lowering {self.lowering}")
        step, fault, outputs = judge_lowering(
            self.graph.phase,
            module,
            self.lowering,
            self.device.lowerings.available[self.lowering],
            inputs,
            ops=op_targets(choices),
            owner=owner,
            progress=self.progress,
        )
        self._tell([step], [fault])
        self.progress(f"{self.graph.phase}: the model itself")
        step, fault = judge_model(self.graph, original, outputs, owner=owner)
        self._tell([step], [fault])

    def _tell(self, steps: Sequence[Step], faults: Sequence[Fault | None]) -> None:
        self.steps += steps
        self.faults += [fault for fault in faults if fault is not None]

    def _passes(self) -> None:
        options: dict[str, Any] = {"tokens": self._tokens(), "constants": self.constants, "check": self._check}
        self._note(self.manager.run(self.module, **options))
        before: list[fx.GraphModule] = []

        def prepare(module: fx.GraphModule) -> None:
            self.progress(f"{self.graph.phase}: to ATen ops")
            put_back_unimplemented(module, implemented_ops(self.device.ops))
            before.append(Snapshot(module).module())

        for staged in later_stages(self.manager.running, self.module, prepare):
            self.module = staged.module
            if before and staged.refused is None:
                self._judge_aten(before.pop(), staged.stage)
            reports = self.manager.run(self.module, staged.stage, form=staged.form, refused=staged.refused, **options)
            self._note(reports)

    def _tokens(self) -> tuple[int, int] | None:
        """Return the least and most tokens of the examples, for passes with a token range."""
        counts = [inputs["input_ids"].numel() for inputs in self.graph.examples if "input_ids" in inputs]
        return (min(counts), max(counts)) if counts else None

    def _check(self, report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self.progress(f"{self.graph.phase}: pass {report.name}, {report.matched} sites")
        found = verify(report, before, after, self.inputs, level=self.level, constants=self.constants)
        self.verifications[report.name] = found
        if not found.passed:
            raise failure(report, found)

    def _judge_aten(self, before: fx.GraphModule, stage: Stage) -> None:
        report = PassReport(
            name="to_aten" if stage == "aten" else "to_functional",
            owner="core",
            stage=stage,
            matched=0,
            expected=None,
            elapsed_ms=0.0,
            sites=(),
            near_misses=(),
        )
        with suppress(CoreError):  # reported below from the result
            self._check(report, before, self.module)
        self._note([report])

    def _note(self, reports: Sequence[PassReport]) -> None:
        for report in reports:
            found = self.verifications.get(report.name)
            fault = self._fault(report, found)
            self._tell([self._step(report, found, fault)], [fault])

    def _fault(self, report: PassReport, found: Verification | None) -> Fault | None:
        site, ratio = "", float("inf")
        nodes: tuple[str, ...] = ()
        if found is not None and found.fault is not None:
            finding = found.fault
            site, reason, ratio = finding.where, finding.reason, finding.ratio
            nodes = (finding.node,) if finding.node else ()
        elif report.error:
            reason = _found(report.error)
        else:
            return None
        return Fault(
            phase=self.graph.phase,
            kind="pass",
            name=report.name,
            owner=report.owner,
            site=site,
            nodes=nodes,
            reason=reason,
            ratio=ratio,
        )

    def _step(self, report: PassReport, found: Verification | None, fault: Fault | None) -> Step:
        outcome, note = _outcome(report, found, fault)
        step = Step(
            phase=self.graph.phase,
            kind="pass",
            name=report.name,
            owner=report.owner,
            outcome=outcome,
            matched=report.matched,
            note=note,
        )
        if found is None:
            return step
        return replace(
            step,
            # An undone pass reports none of its matches.
            matched=report.matched or found.num_sites + found.num_whole,
            num_sites=found.num_sites,
            num_whole=found.num_whole,
            num_values=found.num_values,
            worst_ratio=found.worst_ratio,
        )


def _outcome(report: PassReport, found: Verification | None, fault: Fault | None) -> tuple[Outcome, str]:
    if fault is not None:
        return "fault", "it was undone, and what follows was judged without it"
    if report.skipped:
        return "skipped", report.skipped
    if found is None:
        return "skipped", "it matched nothing, and left the graph as it was"
    if found.unjudged:
        return "unjudged", found.unjudged
    owed = report.expected is not None and report.expected != report.matched
    notes = [f"it owes {report.expected} matches"] if owed else []
    # A near-miss without a place is about the graph as a whole.
    note = "; ".join([*notes, *(miss.reason for miss in report.near_misses if not miss.site)])
    return ("ok", note) if found.num_values else ("nothing", "the graph has no output and writes nothing")


def _found(error: str) -> str:
    """Return what an error of the tree found, as one line."""
    lines = error.split("\n  to do: ")[0].split("\n  found: ")
    return " ".join(lines[-1].split())
