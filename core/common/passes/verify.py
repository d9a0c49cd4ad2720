"""Whether a pass kept the numbers: the graph before and after it on real inputs, judged against an fp64 run.

Two checks. The whole graph: its outputs and every tensor it writes into, which also finds a rewrite that moved past a
write. And each site on its own, both sides fed with the values of the run before the pass: it says where the fault is.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.common.numerics import MIN_ELEMENTS, judge
from core.common.passes.regions import Recorder, Region, Run, find_regions, run_graph
from core.errors import PassError

if TYPE_CHECKING:
    from core.common.config import Verify
    from core.common.passes.manager import PassReport

log = logging.getLogger("core.passes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A wrong result. where: a site, a graph output or a written input. ratio: measured over bound, inf for T0."""

    where: str
    reason: str
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The outcome for one pass on one graph.

    num_values: tensors judged in whole-graph runs. num_sites: sites judged apart, of those that the pass rewrote.
    worst_ratio: the largest error over its bound; at most 1 passes. unjudged: why no fp64 reference could be had.
    """

    pass_name: str
    num_inputs: int
    num_values: int
    num_sites: int
    worst_ratio: float
    findings: tuple[Finding, ...]
    unjudged: str = ""

    @property
    def passed(self) -> bool:
        """True where everything that was judged is within its bound."""
        return not self.findings

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


def verify(
    report: PassReport,
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Sequence[Any]],
    *,
    level: Verify = "full",
) -> Verification:
    """Run both graphs on inputs (one value per placeholder, several sets) and judge the graph after by the one before.

    level: "full" judges every input set and every site, "sample" the first set and a random third of the sites, "off"
    nothing. Nothing is written into the given tensors. The fp64 run is done on the CPU and holds every input in fp64.
    """
    judged = _Judged()
    if level == "off":
        return judged.verification(report, 0, 0)
    chosen = inputs if level == "full" else inputs[:1]
    regions = find_regions(report.name, before, after)
    if level == "sample" and regions:
        # Seeded by the pass: a failure is found again by the next run.
        regions = random.Random(report.name).sample(regions, max(1, len(regions) // 3))
    for values in chosen:
        recorder = Recorder(regions)
        old = run_graph(before, values, recorder=recorder)
        judged.whole(old, run_graph(after, values), before, values)
        for region in regions:
            judged.site(region, recorder)
    return judged.verification(report, len(chosen), len(regions))


def checker(
    inputs: Sequence[Sequence[Any]], level: Verify
) -> Callable[[PassReport, fx.GraphModule, fx.GraphModule], None]:
    """Return a check for `PassManager.run` that raises `PassError` naming pass, site and ratio."""

    def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
        found = verify(report, before, after, inputs, level=level)
        if found.unjudged:
            log.warning("pass %s of %s was not verified: %s", report.name, report.owner, found.unjudged)
        if not found.passed:
            raise failure(report, found)

    return check


def failure(report: PassReport, found: Verification) -> PassError:
    """Return the error for a verification that did not pass."""
    # A site is more telling than an output, and the first of several is where the fault enters.
    first = next((f for f in found.findings if f.where in report.sites), found.findings[0])
    others = f"; {len(found.findings) - 1} more" if len(found.findings) > 1 else ""
    return PassError(
        f"verifying pass {report.name!r} of {report.owner} ({report.matched} sites)",
        found=f"at {first.where}: {first.reason} (ratio {first.ratio:.3g}, 1 passes){others}",
        remedy=f"leave it out (passes without {report.name!r}) and report it to {report.owner}",
    )


class _Judged:
    """Collects what was judged."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.worst = 0.0
        self.num_values = 0
        self.unjudged = ""

    def whole(self, old: Run, new: Run, before: fx.GraphModule, values: Sequence[Any]) -> None:
        reference = self._reference(lambda: run_graph(before, values, fp64=True))
        if reference is None:
            return
        names = [f"output {index}" for index in range(len(old.outputs))]
        names += [f"input {name}" for name in old.written]
        results = [*new.outputs, *(new.written.get(name, new.inputs[name]) for name in old.written)]
        exact = [*reference.outputs, *(reference.written[name] for name in old.written)]
        self._judge(names, results, [*old.outputs, *old.written.values()], exact)

    def site(self, region: Region, recorder: Recorder) -> None:
        seen = recorder.inputs.get(region.key)
        if seen is None:
            return
        # `fp64` runs what was replaced, on the values that both sides have got.
        reference = self._reference(lambda: run_graph(region.before, region.order_before(seen), fp64=True))
        if reference is None:
            return
        result = run_graph(region.after, region.order_after(seen))
        old = [recorder.outputs[name] for name in region.outputs]
        self._judge([region.site] * len(old), result.outputs, old, reference.outputs)

    def _reference(self, run: Callable[[], Run]) -> Run | None:
        try:
            return run()
        except Exception as error:  # a kernel without fp64 or without a CPU form: whose fault, can't be told
            self.unjudged = f"the fp64 run failed with {type(error).__name__}: {error}"
            return None

    def _judge(self, names: Sequence[str], results: Sequence[Any], olds: Sequence[Any], exact: Sequence[Any]) -> None:
        for name, result, old, reference in zip(names, results, olds, exact, strict=True):
            reason, ratio = _compare(result, old, reference)
            self.num_values += 1
            self.worst = max(self.worst, ratio)
            if reason:
                self.findings.append(Finding(where=name, reason=reason, ratio=ratio))

    def verification(self, report: PassReport, num_inputs: int, num_sites: int) -> Verification:
        return Verification(
            pass_name=report.name,
            num_inputs=num_inputs,
            num_values=self.num_values,
            num_sites=num_sites,
            worst_ratio=self.worst,
            findings=tuple(self.findings),
            unjudged=self.unjudged,
        )


def _compare(result: Any, old: Any, reference: Any) -> tuple[str, float]:
    """Judge one value by T0 and T1; return the reason why it fails ("" if not) and its error over the bound."""
    inf = float("inf")
    if not isinstance(old, Tensor) or not isinstance(result, Tensor):
        return ("", 0.0) if type(result) is type(old) and result == old else (f"{result!r} instead of {old!r}", inf)
    if result.shape != old.shape or result.dtype != old.dtype:
        kinds = [f"{tuple(t.shape)} {t.dtype}" for t in (result, old)]
        return f"{kinds[0]} instead of {kinds[1]}", inf
    if torch.equal(result, old):
        return "", 0.0
    if not old.dtype.is_floating_point:
        return f"{int((result != old).sum())} of {old.numel()} elements differ", inf
    if old.numel() < MIN_ELEMENTS:
        return _compare_few(result, old, reference)
    verdict = judge(result, old, reference)
    return verdict.reason, max(verdict.rms_ratio, verdict.max_ratio)


def _compare_few(result: Tensor, old: Tensor, reference: Tensor) -> tuple[str, float]:
    """Judge a value too small for T1 by its largest error, with a floor of four roundings of its size."""
    g, e, r = (t.detach().to("cpu", torch.float64) for t in (result, old, reference))
    if not torch.equal(g.isfinite(), r.isfinite()):
        return "NaN or infinity where the reference has none, or the reverse", float("inf")
    keep = r.isfinite() & e.isfinite()
    errors = [float((t - r)[keep].abs().max()) if keep.any() else 0.0 for t in (g, e)]
    bound = 3 * errors[1] + 4 * torch.finfo(old.dtype).eps * (float(r[keep].pow(2).mean().sqrt()) if keep.any() else 0)
    ratio = errors[0] / bound if bound else (float("inf") if errors[0] else 0.0)
    return (f"error over bound: max {ratio:.3g} (1 passes)" if ratio > 1 else ""), ratio
