"""Checks that a pass kept the numbers: runs the graph before and after it on real inputs, judged against an fp64 run.

Two checks are made. The check of the whole graph compares its outputs and every tensor that it writes into, and so
finds a rewrite that moved past a write. The check of each site feeds both sides with the values of the run before the
pass, and so says where the fault is. If the whole is wrong and no site is, the first value that differs gives the place
(divergence.py). Values equal in every bit need no reference, so fp64 runs are made only if something differs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from core.common.passes.sites import MADE_BY
from core.errors import PassError
from core.verify.codes import codes_among, outputs_among, quantisations
from core.verify.compare import Comparison
from core.verify.divergence import first_divergence
from core.verify.execution import Place, Run, bind, error_line, run_graph, widened
from core.verify.regions import Feed, Region, find_regions

if TYPE_CHECKING:
    from core.common.passes.constants import Constants
    from core.compilation.options import Verify
    from core.compilation.rewrite.pass_report import PassReport

log = logging.getLogger("core.passes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A wrong result."""

    #: A site, a graph output or a written input.
    where: str
    reason: str
    #: The measured error over its bound; infinite where T0 is broken.
    ratio: float
    #: The node at fault in the graph after the pass; "" for outputs and written inputs.
    node: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The outcome for one pass on one graph."""

    #: Input sets that both graphs ran on.
    num_inputs: int
    #: Tensors judged.
    num_values: int
    #: Sites judged apart.
    num_sites: int
    #: Sites that only the run of the whole graph judges.
    num_whole: int
    #: The largest error over its bound; at most 1 passes.
    worst_ratio: float
    findings: tuple[Finding, ...]
    #: Why there is no fp64 reference; values that differ in any bit were then not judged.
    unjudged: str = ""
    #: Why the graph before the pass can't be run, which is not the pass's fault; also part of `unjudged`.
    unrunnable: str = ""

    @property
    def passed(self) -> bool:
        """True where everything that was judged is within its bound."""
        return not self.findings

    @property
    def fault(self) -> Finding | None:
        """The most telling finding: the first one that has a place in the graph, else the first."""
        return next((f for f in self.findings if f.node), self.findings[0] if self.findings else None)


def verify(
    report: PassReport,
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Sequence[Any]],
    *,
    level: Verify = "full",
    constants: Constants | None = None,
) -> Verification:
    """Run both graphs on sets of inputs and judge the graph after the pass.

    Nothing is written into the given tensors. The fp64 run is done on the CPU; besides what the graph writes, it holds
    one weight at a time in fp64.

    - inputs: sets of values, one value for each placeholder of the traced graph.
    - level: "full" judges every set and every site, "sample" the first set and a random third of the sites, "off"
      nothing.
    - constants: what passes have bound to placeholders that they appended.
    """
    if level == "off":
        return _Judged(report, before, after, constants).verification(0, 0)
    chosen = inputs if level == "full" else inputs[:1]
    regions = find_regions(report.name, before, after)
    num_regions = len(regions)
    if level == "sample" and regions:
        # Seeded by the pass: a failure is found again by the next run.
        regions = random.Random(report.name).sample(regions, max(1, len(regions) // 3))
    judged = _Judged(report, before, after, constants)
    for values in chosen:
        judged.inputs(values, regions)
    return judged.verification(len(chosen), max(0, report.matched - num_regions))


def checker(
    inputs: Sequence[Sequence[Any]], level: Verify, constants: Constants | None = None
) -> Callable[[PassReport, fx.GraphModule, fx.GraphModule], str]:
    """Return a check for `PassManager.run` that raises `PassError` naming pass, site and ratio.

    A graph that can't be run even before any pass keeps all passes from being verified, and is logged once.
    """
    told: list[str] = []

    def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> str:
        if not inputs:
            return "none of the examples fits the sizes that the graph serves"
        found = verify(report, before, after, inputs, level=level, constants=constants)
        if not found.passed:
            raise failure(report, found)
        if found.unrunnable and not told:
            log.warning("the passes on this graph are not verified: %s", found.unrunnable)
            told.append(found.unrunnable)
        elif found.unjudged and not found.unrunnable:
            log.warning("pass %r of %s was not verified: %s", report.name, report.owner, found.unjudged)
        return found.unjudged

    return check


def failure(report: PassReport, found: Verification) -> PassError:
    """Return the error for a verification that did not pass."""
    assert found.fault is not None
    others = f"; {len(found.findings) - 1} more" if len(found.findings) > 1 else ""
    return PassError(
        f"verifying pass {report.name!r} of {report.owner} ({report.matched} sites)",
        found=f"at {found.fault.where}: {found.fault.reason} (ratio {found.fault.ratio:.3g}, allowed: 1){others}",
        remedy=f"leave it out (passes without {report.name!r}) and report it to {report.owner}",
    )


class _Judged:
    """Judges a pass on one set of inputs after the other, and collects what was judged."""

    def __init__(
        self, report: PassReport, before: fx.GraphModule, after: fx.GraphModule, constants: Constants | None
    ) -> None:
        self._report, self._before, self._after, self._constants = report, before, after, constants
        self.findings: list[Finding] = []
        self.sites: set[Region] = set()
        self.compared = Comparison()
        self.unrunnable = ""

    def inputs(self, values: Sequence[Any], regions: Sequence[Region]) -> None:
        """Judge the sites and the whole graph on one set of inputs."""
        num_findings = len(self.findings)
        known = bind(self._before, values, self._constants)
        added = bind(self._after, values, self._constants)
        old_values, new_values = list(known.values()), list(added.values())
        added = {name: value for name, value in added.items() if name not in known}
        place = Place()
        try:
            old = run_graph(self._before, old_values, watchers=[place, Feed(regions, added, self.site)])
        except Exception as error:  # the graph failed already without the pass
            self.unrunnable = self.unrunnable or (
                f"the model's own graph can't be run on the examples: {place}: {error_line(error)}"
            )
            return
        pinned = _unchanged(old.decided, self._report.name, self._before, self._after)
        codes, decided = self._codes_and_decided(self._before.graph, old, kept=pinned)
        try:
            new = run_graph(self._after, new_values, pinned=pinned)
        except Exception as error:
            self._wrong("the rewritten graph", f"it can't be run: {error_line(error)}")
            return
        self.whole(old, new, old_values, decided, codes)
        if len(self.findings) > num_findings and not any(finding.node for finding in self.findings[num_findings:]):
            found = first_divergence(
                self._report.name, (self._before, old_values), (self._after, new_values), decided, pinned, codes
            )
            if found is not None:
                self.findings.append(Finding(where=found.site, reason=found.reason, ratio=found.ratio, node=found.node))

    def whole(
        self, old: Run, new: Run, values: Sequence[Any], decided: Mapping[str, Any], codes: Collection[str]
    ) -> None:
        """Judge outputs and written inputs of the two whole runs.

        decided: values that the fp64 run takes from the old run; codes: nodes that the pass may quantise anew.
        """
        if len(old.outputs) != len(new.outputs):
            self._wrong("the outputs", f"{len(new.outputs)} instead of {len(old.outputs)}")
            return
        untouched = [name for name in new.written if name in old.inputs and name not in old.written]
        if untouched:
            results, olds = [new.written[name] for name in untouched], [old.inputs[name] for name in untouched]
            self._judge([f"input {name}" for name in untouched], results, olds, lambda: list(map(widened, olds)))

        names = [f"output {index}" for index in range(len(old.outputs))]
        names += [f"input {name}" for name in old.written]
        results = [*new.outputs, *(new.inputs[name] for name in old.written)]

        def exact() -> list[Any]:
            return run_graph(self._before, values, fp64=True, pinned=decided).results

        self._judge(names, results, old.results, exact, codes=outputs_among(self._before, codes))

    def site(self, region: Region, seen: Mapping[str, Any]) -> None:
        """Judge one region on the values that both sides get."""
        given = [seen[name] for name in region.sources_before]
        old = run_graph(region.before, given)
        self.sites.add(region)
        try:
            new = run_graph(region.after, [seen[name] for name in region.sources_after])
        except Exception as error:
            self._wrong(region.site, f"it can't be run: {error_line(error)}", region.node)
            return
        sides = ((region.sources_before, old), (region.sources_after, new))
        wrote = dict.fromkeys(
            source
            for sources, run in sides
            for source, placeholder in zip(sources, run.inputs, strict=True)
            if placeholder in run.written
        )

        def results(sources: Sequence[str], run: Run) -> list[Any]:
            held = {**seen, **dict(zip(sources, run.inputs.values(), strict=True))}
            return [*run.outputs, *(held[name] for name in wrote)]

        codes, decided = self._codes_and_decided(region.before.graph, old)

        def exact() -> list[Any]:
            return results(region.sources_before, run_graph(region.before, given, fp64=True, pinned=decided))

        names = [region.site] * (len(old.outputs) + len(wrote))
        coded = outputs_among(region.before, codes)
        old_results, new_results = (results(*side) for side in sides)
        self._judge(names, new_results, old_results, exact, region.node, coded)

    def _codes_and_decided(
        self, graph: fx.Graph, run: Run, kept: Collection[str] = ()
    ) -> tuple[frozenset[str], dict[str, Any]]:
        """Return the nodes whose codes the pass may make anew, and what all other nodes decided in a run.

        Codes are rounded values and no decision: the fp64 run rounds them too. kept: nodes whose codes stay.
        """
        codes = codes_among(graph, quantisations(graph, self._report.codes) - set(kept))
        return codes, {name: value for name, value in run.decided.items() if name not in codes}

    def _judge(
        self,
        names: Sequence[str],
        results: Sequence[Any],
        olds: Sequence[Any],
        exact: Callable[[], Sequence[Any]],
        node: str = "",
        codes: Collection[int] = (),
    ) -> None:
        for name, reason, ratio in self.compared.add(names, results, olds, exact, codes):
            self.findings.append(Finding(where=name, reason=reason, ratio=ratio, node=node))

    def _wrong(self, where: str, reason: str, node: str = "") -> None:
        self.compared.fail(where, reason)
        self.findings.append(Finding(where=where, reason=reason, ratio=float("inf"), node=node))

    def verification(self, num_inputs: int, num_whole: int) -> Verification:
        return Verification(
            num_inputs=num_inputs,
            num_values=self.compared.num_values,
            num_sites=len(self.sites),
            num_whole=num_whole,
            worst_ratio=self.compared.worst,
            findings=tuple(self.findings),
            unjudged=self.unrunnable or self.compared.unjudged,
            unrunnable=self.unrunnable,
        )


def _unchanged(
    decided: Mapping[str, Any], pass_name: str, before: fx.GraphModule, after: fx.GraphModule
) -> dict[str, Any]:
    """Return the decisions of nodes that are in both graphs; decisions of new nodes are judged."""
    targets = {node.name: node.target for node in before.graph.nodes}
    return {
        node.name: decided[node.name]
        for node in after.graph.nodes
        if node.name in decided
        and node.target == targets.get(node.name)
        and getattr(node.meta.get(MADE_BY), "pass_name", "") != pass_name
    }
