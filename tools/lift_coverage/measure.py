"""How many of a model's sites the passes lift, and whether the numbers stay: one model type, several variants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes.declaration import Pass
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import bound_constants
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.static.cache import CachedPhase, static_phases
from core.errors import TraceError
from core.verify.compare import compare
from core.verify.execution import run_graph
from lift_coverage.match import Missed, disagreements, match_sites, signatures
from lift_coverage.oracle import KINDS, Site, find_sites


@dataclass(frozen=True, order=True, slots=True)
class Variant:
    """One way to run a model. dtype, attention: by name. phase: prefill or decode. dynamic: any number of tokens."""

    dtype: str
    attention: str
    phase: str
    dynamic: bool = False

    @property
    def name(self) -> str:
        """One word for reports and files."""
        return f"{self.phase}{'-dynamic' if self.dynamic else ''}-{self.dtype}-{self.attention}"


VARIANTS = (
    Variant("float32", "sdpa", "prefill"),
    Variant("float32", "sdpa", "prefill", dynamic=True),
    Variant("float32", "sdpa", "decode"),
    Variant("float32", "eager", "prefill"),
    Variant("bfloat16", "sdpa", "prefill"),
    Variant("bfloat16", "sdpa", "decode"),
)
"""The variants of the sweep; those of one dtype and attention stand together, since they share a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The rewritten graph's numbers against those of the graph as traced."""

    #: Whether every bit is equal.
    equal: bool
    #: The largest error over the bound of criterion T1, which passes up to 1.
    ratio: float = 0.0
    reason: str = ""
    #: Why there was no reference to judge by; "" where there was one.
    unjudged: str = ""

    @property
    def passed(self) -> bool:
        """True where every output and every written input is within its bound."""
        return self.equal or not (self.reason or self.unjudged)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What the passes lifted in one graph.

    num_sites, num_lifted: by kind. missed: the others. extra: canonical ops at no site of the oracle (`kind at path`).
    disagreements: modules called more or less often in the eager run than in the trace. errors: of passes that were
    undone. matched: by pass. signatures: what tells the forms of sites and ops apart.
    """

    num_sites: Mapping[str, int]
    num_lifted: Mapping[str, int]
    missed: tuple[Missed, ...]
    extra: tuple[str, ...]
    disagreements: tuple[str, ...]
    errors: tuple[str, ...]
    matched: Mapping[str, int]
    signatures: tuple[str, ...]
    judged: Judged


@dataclass(frozen=True, kw_only=True, slots=True)
class Untraced:
    """A variant without a whole graph: the reason, and how many sites of each kind it ran through eagerly."""

    error: TraceError
    num_sites: Mapping[str, int]


def measure_type(
    model_type: str, passes: Sequence[Pass], variants: Iterable[Variant] = VARIANTS
) -> Iterator[tuple[Variant, Coverage | Untraced]]:
    """Build a model type tiny, and yield each variant with what the passes lifted in it.

    Raises what building raises, and what the model raises where it has no static cache.
    """
    for (dtype, attention), group in groupby(variants, key=lambda variant: (variant.dtype, variant.attention)):
        chosen = list(group)
        asked = {variant.phase for variant in chosen}
        # Two models: the oracle's run writes the caches, and a failed trace may leave stand-ins behind.
        seen = {phase.name: phase for phase in _phases(model_type, dtype, attention)[1]}
        model, phases = _phases(model_type, dtype, attention)
        sites = {each.name: find_sites(model, each.function, each.inputs) for each in phases if each.name in asked}
        for variant in chosen:
            phase = seen[variant.phase]
            try:
                yield variant, measure(sites[variant.phase], phase, passes, dynamic=variant.dynamic)
            except TraceError as error:
                masked = _measure_masked(model_type, variant, sites[variant.phase], passes)
                yield variant, masked or Untraced(error=error, num_sites=_counts(sites[variant.phase]))
                seen = {phase.name: phase for phase in _phases(model_type, dtype, attention)[1]}


def _measure_masked(
    model_type: str, variant: Variant, sites: Sequence[Site], passes: Sequence[Pass]
) -> Coverage | None:
    """Measure with a mask given to a model that can't be traced while it makes its own; None where that is no help."""
    try:
        phases = _phases(model_type, variant.dtype, variant.attention, masked=True)[1]
        phase = next(phase for phase in phases if phase.name == variant.phase)
        return measure(sites, phase, passes, dynamic=variant.dynamic)
    except Exception:  # the error of the plain form is told; this was an attempt
        return None


def _phases(
    model_type: str, dtype: str, attention: str, *, masked: bool = False
) -> tuple[Any, tuple[CachedPhase, ...]]:
    config = tiny_config(model_type)
    if attention == "eager":
        config._attn_implementation = "eager"
    model = build_model(config, torch_device=torch.device("cpu"), dtype=getattr(torch, dtype)).model
    return model, static_phases(model, masked=masked)


def _counts(sites: Sequence[Site]) -> dict[str, int]:
    counted = Counter(site.kind for site in sites)
    return {kind: counted[kind] for kind in KINDS}


def measure(sites: Sequence[Site], phase: CachedPhase, passes: Sequence[Pass], *, dynamic: bool = False) -> Coverage:
    """Trace the phase, run the passes, count what they lifted of the sites, and judge the numbers by T1.

    sites: of the same phase of another model, since the oracle's run writes the caches. Raises `TraceError`.
    """
    # Copies, because marking a dimension dynamic is a property of the tensor, and stays.
    inputs = {name: tensor.clone() for name, tensor in phase.inputs.items()}
    traced = trace(phase.function, inputs, dynamic=phase.dynamic if dynamic else None)
    return measure_traced(sites, traced, inputs, passes)


def measure_traced(
    sites: Sequence[Site], traced: TracedGraph, inputs: Mapping[str, Tensor], passes: Sequence[Pass]
) -> Coverage:
    """Run the passes on a trace, in place, and count and judge as `measure` does."""
    before = Snapshot(traced.module).module()
    constants = bound_constants(traced)
    reports = PassManager(passes).run(traced.module, constants=constants)
    missed, extra = match_sites(sites, traced.module, reports)
    owed, left = _counts(sites), _counts([miss.site for miss in missed])
    return Coverage(
        num_sites=owed,
        num_lifted={kind: owed[kind] - left[kind] for kind in KINDS},
        missed=missed,
        extra=extra,
        disagreements=disagreements(sites, before),
        errors=tuple(f"{report.name}: {report.error}" for report in reports if report.error),
        matched={report.name: report.matched for report in reports if report.matched},
        signatures=signatures(sites, traced.module),
        judged=judge_graphs(before, traced.module, traced.values(inputs), [value for _, value in constants.added]),
    )


def judge_graphs(
    before: fx.GraphModule, after: fx.GraphModule, values: Sequence[Any], added: Sequence[Tensor] = ()
) -> Judged:
    """Run both graphs on the values, and where a bit differs judge outputs and written inputs by T1.

    added: what the placeholders that the passes appended are bound to.
    """
    old = run_graph(before, values)
    # Integers that both graphs compute from floats are taken from one run, so that a tie decides alike in all three.
    new = run_graph(after, [*values, *added], pinned=old.decided)
    names = [f"output {index}" for index in range(len(old.outputs))] + [f"input {name}" for name in old.written]
    olds = [*old.outputs, *old.written.values()]
    news = [*new.outputs, *(new.inputs[name] for name in old.written)]
    reference: list[Any] = []

    def exact(index: int) -> Any:
        if not reference:
            run = run_graph(before, values, fp64=True, pinned=old.decided)
            reference.extend([*run.outputs, *(run.inputs[name] for name in old.written)])
        return reference[index]

    ratios, reasons = [0.0], []
    for index, name in enumerate(names):
        try:
            reason, ratio = compare(news[index], olds[index], partial(exact, index)) or ("no reference", 0.0)
        except Exception as error:  # a kernel without fp64: whose fault a difference is can't be told
            return Judged(equal=False, unjudged=f"{type(error).__name__}: {error}")
        ratios.append(ratio)
        reasons += [f"{name}: {reason}"] if reason else []
    return Judged(equal=not reference and not reasons, ratio=max(ratios), reason="; ".join(reasons[:3]))
