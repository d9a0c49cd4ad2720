"""Where a pass fires: in its own examples or patterns, each of which must give a match, and in the corpus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from core.common.passes.declaration import Pass
from core.errors import TraceError
from core_conformance.cases.passes.examples import declared_samples, pattern_samples
from core_conformance.cases.passes.many_models import NUM_SITES, repeated
from core_conformance.cases.passes.runs import CORPUS, Bench, CannotRun, Change, Sample, Walk, tokens_for


@dataclass
class Firings:
    """The results of one pass over all samples of a dtype."""

    #: The walk of every sample that ran.
    walks: list[Walk] = field(default_factory=list)
    #: Why an own example counts as a failure.
    silent: list[str] = field(default_factory=list)
    #: Further notes for the report.
    notes: list[str] = field(default_factory=list)
    #: The samples that do not run here, each with the reason.
    missing: list[str] = field(default_factory=list)

    def matched(self, name: str) -> list[Walk]:
        """Return the walks in which the pass claims a match."""
        return [walk for walk in self.walks if walk.matched(name)]

    def changes(self, name: str) -> list[Change]:
        """Return what the pass did, where it claims a match or changed the graph, own examples first, then by size."""
        found = [walk.changes[name] for walk in self.walks if name in walk.changes]
        own = set(CORPUS.values())
        return sorted(found, key=lambda change: (change.sample in own, len(change.before.graph.nodes)))

    def nowhere(self, declared: Pass) -> str:
        """Say that the pass matched nothing: what was tried, what came close, and what to do."""
        tried = ", ".join(walk.sample.name for walk in self.walks)
        reports = [walk.reports[declared.name] for walk in self.walks if declared.name in walk.reports]
        reasons = [report.skipped or report.error for report in reports]
        reasons += [miss.reason for report in reports for miss in report.near_misses]
        close = "; ".join(dict.fromkeys(filter(None, reasons)))
        facts = [f"it matches nothing in {len(self.walks)} models ({tried})", *self.notes]
        facts += [f"what came close: {close[:300]}"] if close else []
        return f"{'; '.join(facts)}. Mend it, or declare in Pass(examples=...) small models in which it has to match"


def firings(bench: Bench, declared: Pass, dtype: torch.dtype) -> Firings:
    """Run all samples that concern a pass, in one dtype."""
    key = (declared.name, dtype)
    if key not in bench.firings:
        bench.firings[key] = _firings(bench, declared, dtype)
    found: Firings = bench.firings[key]
    return found


def _firings(bench: Bench, declared: Pass, dtype: torch.dtype) -> Firings:
    found = Firings()
    for sample in declared_samples(declared):
        walk = _walk(bench, declared, sample, dtype, found)
        if walk is None:
            continue
        if walk.matched(declared.name):
            found.notes += _walk_several(bench, declared, sample, dtype, found)
        else:
            found.silent.append(f"{sample.name}: {_why_silent(bench, declared, walk, dtype)}")
    patterns = enumerate(pattern_samples(declared) if declared.examples is None else ())
    taken = [_try(bench, declared, index, tries, dtype, found) for index, tries in patterns]
    for sample in CORPUS.values():
        _walk(bench, declared, sample, dtype, found)
    # It is no fault if other passes rewrite all of a pattern, as long as the pass matches elsewhere.
    (found.notes if found.matched(declared.name) else found.silent).extend(filter(None, taken))
    return found


def _walk(bench: Bench, declared: Pass, sample: Sample, dtype: torch.dtype, found: Firings) -> Walk | None:
    try:
        walk = bench.walk(sample, dtype, tokens_for(declared))
    except (CannotRun, TraceError) as error:
        if sample.owed:
            found.silent.append(f"{sample.name}: {error}")
        else:
            found.missing.append(str(error))
        return None
    found.walks.append(walk)
    return walk


def _walk_several(bench: Bench, declared: Pass, sample: Sample, dtype: torch.dtype, found: Firings) -> list[str]:
    """Run a sample in which the pass matched, several times over in one graph; return why that could not be, if so."""
    several = Sample(f"{sample.name}, {NUM_SITES} times", partial(repeated, sample.build))
    try:
        found.walks.append(bench.walk(several, dtype, tokens_for(declared)))
    except (CannotRun, TraceError) as error:
        return [str(error)]
    return []


def _try(bench: Bench, declared: Pass, index: int, tries: Iterable[Sample], dtype: torch.dtype, found: Firings) -> str:
    """Run a pattern on one set of shapes after another until the pass matches; return what keeps it from matching."""
    count = 0
    for sample in tries:
        aside = Firings()
        walk = _walk(bench, declared, sample, dtype, aside)
        if walk is None:
            continue
        if walk.matched(declared.name):
            found.walks.append(walk)
            found.notes += _walk_several(bench, declared, sample, dtype, found)
            return ""
        if bench.alone(declared, sample, dtype).matched(declared.name):
            return f"{sample.name}: {_taken(declared, walk)}"
        count += 1
    where = f"does not match, on {count} sets of inputs" if count else "runs on none of the shapes and numbers tried"
    found.notes.append(f"pattern {index} as a model {where}")
    return ""


def _why_silent(bench: Bench, declared: Pass, walk: Walk, dtype: torch.dtype) -> str:
    report = walk.reports.get(declared.name)
    if report is None:
        return f"the passes could not run: {walk.failed}"
    if report.error or report.skipped:
        return f"it matches nothing: {report.error or 'skipped, ' + report.skipped}"
    if bench.alone(declared, walk.sample, dtype).matched(declared.name):
        return _taken(declared, walk)
    close = "; ".join(miss.reason for miss in report.near_misses)
    return "it matches nothing in its own example" + (f": {close[:300]}" if close else "")


def _taken(declared: Pass, walk: Walk) -> str:
    others = ", ".join(repr(name) for name, report in walk.reports.items() if report.matched and name != declared.name)
    return (
        f"it matches on its own, and nothing once the passes before it have run ({others}): no program will ever see"
        " it match; order it before the pass that takes what it looks for"
    )
