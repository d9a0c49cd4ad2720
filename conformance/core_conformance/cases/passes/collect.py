"""Level 2: each pass of the device fires, reports what it did, and keeps the numbers, on matches and near-misses.

Nothing here knows what a pass does. A pass must fire on its own examples (`Pass.examples`, or its patterns), else on a
corpus of small models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import fx, nn

from core.common.conformance import ConformanceProfile
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.compilation.rewriting import device_passes
from core.device import Device
from core.verify.execution import bind, run_graph
from core_conformance.case import Case
from core_conformance.cases.ops.collect import slug
from core_conformance.cases.passes.claims import check_identity, unclaimed, unstable
from core_conformance.cases.passes.examples import example_dtypes
from core_conformance.cases.passes.firings import Firings, firings
from core_conformance.cases.passes.mutations import near_misses
from core_conformance.cases.passes.pipeline import TINY, check_program, check_tiny_model
from core_conformance.cases.passes.runs import CORPUS, Bench, Change, bench, tokens_for
from core_conformance.dtypes import DTYPES, dtype_name, working_dtype
from core_conformance.trial import NotSupported, Skip, Trial

_NUM_MODELS = 2
"""Number of models in which near-misses are made."""


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield the cases of this area: five or more per pass, those of all passes together, and tiny models."""
    for declared in device_passes(device):
        yield from _cases(device, declared)
    for name in CORPUS:
        for dtype in DTYPES[:2]:
            yield Case(
                id=f"passes/pipeline/{name}/{dtype_name(dtype)}",
                what=f"the model {name}, rewritten by all passes, gives what it gives eagerly",
                run=partial(check_program, name=name, dtype=dtype),
                not_supported=_why_no_dtype(device, dtype),
            )
    for name in TINY:
        yield Case(
            id=f"passes/models/{name}",
            what=f"every pass and implementation in a tiny {name}, and the program of it, are right",
            run=partial(check_tiny_model, model_type=name, dtype=working_dtype(device)),
        )


def _cases(device: Device, declared: Pass) -> Iterator[Case]:
    refused = refusal(device, declared)
    usable = [dtype for dtype in DTYPES if not _why_unfit(device, declared, dtype)]
    main = _main(declared, usable)
    if main is None:
        refused = (
            refused or f"none of the dtypes {', '.join(map(dtype_name, DTYPES))} is both the pass's and the device's"
        )

    def case(kind: str, what: str, run: Callable[..., None], no: str = "", **options: object) -> Case:
        name = f"passes/{slug(declared.name)}/{kind}"
        return Case(id=name, what=what, run=partial(run, declared=declared, **options), not_supported=refused or no)

    yield case("fires", "it matches where it has to, and reports what it did", _check_firing, dtype=main)
    for dtype in DTYPES:
        what = f"what it rewrites keeps its numbers in {dtype_name(dtype)}"
        yield case(dtype_name(dtype), what, _check_numbers, _why_unfit(device, declared, dtype), dtype=dtype)
    yield case("near-miss", "what almost matches keeps its numbers", _check_near_misses, dtype=main)
    yield case("identity", "its uuid is stable, and another for other parameters", check_identity)


def refusal(device: Device, declared: Pass) -> str:
    """Return why the pass's guards exclude this device for every graph, or ""."""
    whatever = replace(declared.guards, dtypes=None, min_rank=0, constants=False, nothing=None)
    nothing = fx.GraphModule(nn.Module(), fx.Graph())
    context = PassContext(
        module=nothing,
        guards=whatever,
        capabilities=device.capabilities,
        tokens=tokens_for(declared),
        implemented=frozenset(implementation.op for implementation in device.ops),
    )
    reason = context.refusal()
    return f"its guard: {reason}" if reason else ""


def _why_unfit(device: Device, declared: Pass, dtype: torch.dtype) -> str:
    allowed = declared.guards.dtypes
    if allowed is not None and dtype not in allowed:
        return f"its guard: dtype {dtype_name(dtype)} is none of {', '.join(sorted(map(dtype_name, allowed)))}"
    return _why_no_dtype(device, dtype)


def _why_no_dtype(device: Device, dtype: torch.dtype) -> str:
    return "" if dtype in device.capabilities.dtypes else f"the device does not compute in {dtype_name(dtype)}"


def _main(declared: Pass, usable: list[torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which a pass is looked at closely: the widest that its patterns were traced for."""
    given = example_dtypes(declared) if declared.guards.dtypes is None else frozenset(usable)
    return next((dtype for dtype in usable if not given or dtype in given), usable[0] if usable else None)


def _check_firing(trial: Trial, declared: Pass, dtype: torch.dtype) -> None:
    """Require a match in each own example, and one somewhere; check each report by the graph."""
    own = bench(trial.device)
    found = firings(own, declared, dtype)
    trial.fail(*found.silent)
    for walk in found.walks:
        report = walk.reports.get(declared.name)
        where = walk.sample.name
        if not trial.require(report is not None, f"{where}: the passes could not run: {walk.failed}"):
            continue
        assert report is not None
        trial.require(not report.error, f"{where}: it fails: {report.error}")
        trial.fail(*(f"{where}: {reason}" for reason in unclaimed(walk, declared)))
    matched = found.matched(declared.name)
    if not matched and not found.silent:
        _explain_nothing(trial, declared, found)
    for change in found.changes(declared.name):
        trial.fail(*(f"{change.sample.name}: {reason}" for reason in unstable(own, change)))
    trial.note(*(f"{walk.matched(declared.name)} in {walk.sample.name}" for walk in matched), *found.notes)


def _explain_nothing(trial: Trial, declared: Pass, found: Firings) -> None:
    # Each pass of core has its model in the corpus, so a pass of core must match there.
    if found.missing and declared.owner == "core":
        raise Skip(f"it matches nowhere, and some models do not run here: {'; '.join(found.missing)}")
    trial.fail(found.nowhere(declared))


def _check_numbers(trial: Trial, declared: Pass, dtype: torch.dtype) -> None:
    """Judge each graph that the pass changed by the graph before."""
    found = firings(bench(trial.device), declared, dtype)
    changes = found.changes(declared.name)
    if not changes:
        given = example_dtypes(declared)
        if declared.guards.dtypes is None and given and dtype not in given:
            traced = ", ".join(sorted(map(dtype_name, given)))
            raise NotSupported(f"its patterns are traced for {traced} and match nothing in {dtype_name(dtype)}")
        _explain_nothing(trial, declared, found)
    for change in changes:
        if _judge(trial, change.sample.name, change) and change.verification.fault is None:
            _judge_by_trace(trial, change.sample.name, change)


def _judge(trial: Trial, name: str, change: Change) -> str:
    """Judge the rewrite of a graph by a pass; return why it could not be judged, or ""."""
    found = change.verification
    reason = "" if found.fault is None else f"at {found.fault.where or found.fault.node}: {found.fault.reason}"
    trial.record(name, "T1", found.worst_ratio, reason)
    return found.unjudged


def _judge_by_trace(trial: Trial, name: str, change: Change) -> None:
    """Judge the outputs by the model as it was traced, where the graph before the pass has no fp64 run.

    It may hold kernels of the device, made by earlier passes.
    """
    wide = run_graph(change.graph.traced.module, change.graph.values()[0], fp64=True).outputs
    values = [bind(module, change.graph.values()[0], change.constants) for module in (change.before, change.after)]
    old = run_graph(change.before, list(values[0].values())).outputs
    new = run_graph(change.after, list(values[1].values())).outputs
    for index, (result, eager, exact) in enumerate(zip(new, old, wide, strict=True)):
        trial.judge(f"{name} output {index}", result, eager, exact)


def _check_near_misses(trial: Trial, declared: Pass, dtype: torch.dtype) -> None:
    """Change graphs in which the pass matched, and judge the pass on them."""
    own = bench(trial.device)
    found = firings(own, declared, dtype)
    changes = _varied([change for change in found.changes(declared.name) if change.report.matched])
    if not changes:
        _explain_nothing(trial, declared, found)
    tried = matched = 0
    for change in changes:
        for what, module in near_misses(change):
            outcome = _judge_near_miss(trial, own, change, what, module)
            tried, matched = tried + (outcome is not None), matched + bool(outcome)
    trial.note(f"{tried} near-misses, {matched} of them with matches left")
    trial.require(tried > 0 or not changes, "no near-miss could be made of its matches")


def _varied(changes: list[Change]) -> list[Change]:
    """Return the first changes, the first in the corpus among them: own examples hold little but the match."""
    corpus = set(CORPUS.values())
    rest = sorted(changes[1:], key=lambda change: change.sample not in corpus)
    return [*changes[:1], *rest][:_NUM_MODELS]


def _judge_near_miss(trial: Trial, own: Bench, change: Change, what: str, module: fx.GraphModule) -> int | None:
    """Run the pass on a near-miss and judge it; return its matches, None where the near-miss itself can't run."""
    values = list(bind(module, change.graph.values()[0], change.constants).values())
    try:
        run_graph(module, values)
    except Exception:  # there is no such model
        return None
    report, again = own.again(change, module)
    name = f"{change.sample.name}, {what}"
    trial.require(not report.error, f"{name}: it fails: {report.error}")
    unjudged = again is not None and _judge(trial, name, again)
    if unjudged:
        trial.note(f"{name}: {unjudged}; what differs was not judged")
    return report.matched
