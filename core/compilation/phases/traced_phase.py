"""A phase that is traced: its graph is rewritten, its ops get implementations, and each bucket is lowered."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core.common.ops.declaration import declared_ops
from core.compilation.arguments import check_breaks
from core.compilation.cache.reports import CachedGraph
from core.compilation.capture.pieces import mark_breaks, op_names
from core.compilation.capture.plan import TracedCropper
from core.compilation.implementations import unmet
from core.compilation.phases.bucket_lowering import BucketLowering
from core.compilation.phases.counted import MAX_WAYS, CountedRun, first_uncovered, flat_outputs, same_structure
from core.compilation.phases.dividing import divided
from core.compilation.phases.phase import Runnable
from core.compilation.report import TraceReport
from core.compilation.rewrite.batch_invariant import chooser_of
from core.compilation.rewrite.stated import check_runnable
from core.compilation.rewriting import bound_constants
from core.compilation.trace.counters import put_back
from core.errors import CaptureError, LoweringError, TraceError

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.phases.phase import Captured, Record, Stages
    from core.compilation.phases.tracer import ServedTrace
    from core.compilation.rewrite.pass_report import PassReport
    from core.compilation.trace.counters import Counted, Numbers
    from core.compilation.trace.traced import TracedGraph
    from core.device import Mode

log = logging.getLogger("core.compilation.compile")


class TracedPhase:
    """A `Phase` whose keys run traced graphs; one graph serves every key that meets its conditions."""

    def __init__(self, name: str, mode: Mode, stages: Stages) -> None:
        self.name = name
        self.mode = mode
        self._stages = stages
        self._request = stages.request
        self._made: list[CachedGraph] = []
        self._serving: dict[GraphKey, CachedGraph] = {}
        self._lowering = BucketLowering(stages)
        #: seconds that the beginning of a lowering took
        self._begun_s: dict[GraphKey, float] = {}
        #: of a model that counts on integers in Python: the graphs of a key, of which each serves some of their values
        self._ways: dict[GraphKey, list[CachedGraph]] = {}

    @property
    def graphs(self) -> Sequence[CachedGraph]:
        """Those of the phase, in order."""
        return self._made

    def prepare(self) -> tuple[GraphKey, ...]:
        """Trace and rewrite the phase for all its keys; nothing is traced or rewritten where the cache has its graphs.

        Raises `TraceError`, and `UsageError` for a break point that is in none of the graphs.
        """
        cache = self._stages.cache
        found = cache.load(self.name, self.mode) if cache is not None else None
        self._made = self._lowering.cut(self._make()) if found is None else found
        if cache is not None and found is None:
            cache.keep(self.name, self.mode, self._made)
        for graph in self._made:
            for key in graph.report.buckets:
                self._serving.setdefault(key, graph)
                self._ways.setdefault(key, []).append(graph)
        if self.mode == "piecewise" and not any(graph.breaks for graph in self._made):
            self._stages.account.note(f"{self.name} is one graph: no op in it is a break point of 'piecewise'")
        return self._request.table.phases[self.name]

    def begin(self, key: GraphKey) -> None:
        """Begin to lower the graph of a key, where one graph serves it."""
        graph = self._serving[key]
        if not graph.traced.counters:
            start = time.perf_counter()
            with _blaming(graph.report.passes):
                self._lowering.begin(key, graph, _aliases(graph.traced, self._stages.buffers.views(key)))
            self._begun_s[key] = self._begun_s.get(key, 0.0) + time.perf_counter() - start

    def abandon(self) -> None:
        """End what runs in the background."""
        self._lowering.abandon()

    def runnable(self, key: GraphKey) -> Runnable:
        """Lower the graph of a key and bind it to its static inputs."""
        traced, inputs = self._serving[key].traced, self._stages.buffers.views(key)
        start = time.perf_counter()
        if traced.counters:
            return self._bind_counted(key, inputs, start)
        values = _aliases(traced, inputs)
        with _blaming(self._serving[key].report.passes):
            run = self._lowering.bind(key, self._serving[key], values)
        return Runnable(
            run=run,
            values=values,
            lower_s=time.perf_counter() - start + self._begun_s.pop(key, 0.0),
            output=lambda: traced.output,
            cropper=TracedCropper(traced, self._request.inputs),
        )

    def _bind_counted(self, key: GraphKey, inputs: Mapping[str, Tensor], start: float) -> Runnable:
        """Return a callable over all graphs of a key; each run takes the one that is valid for the present numbers."""
        ways = []
        for graph in self._ways[key]:
            values = graph.traced.values(inputs)
            with _blaming(graph.report.passes):
                lowered = self._lowering.lower(key, graph, values)
            ways.append((graph.traced, lowered))
        traced = ways[0][0]

        def eager() -> tuple[Tensor, ...]:
            self._stages.runner.fall_back(key, "no trace of the model holds for the numbers that it counts on")
            return flat_outputs(traced.output, self._request.models[self.name](**inputs, **dict(key.guards)))

        return Runnable(
            run=CountedRun(ways, inputs, eager),
            values=tuple(ways),
            lower_s=time.perf_counter() - start,
            output=lambda: traced.output,
            cropper=TracedCropper(traced, self._request.inputs),
        )

    def capture(self, key: GraphKey, record: Record) -> Captured:
        """Capture a key, in parts where its graph was cut; an error names the plugins' passes that changed it."""
        with _blaming(self._serving[key].report.passes), put_back(self._serving[key].traced.counters):
            return record(in_parts=self._serving[key].breaks > 0)

    def check(self, key: GraphKey, runnable: Runnable) -> None:
        """Check nothing: a trace knows its conditions, and serves no key that breaks one."""

    def _make(self) -> list[CachedGraph]:
        """Trace the phase, then rewrite each of its graphs."""
        names = self._break_names() if self.mode == "piecewise" else ()
        made = self._trace({} if self._may_count() else None, names)
        if any(graph.traced.counters for graph in made):
            made = self._all_ways(made, names)
        if self.mode == "piecewise":  # the default names need not occur in a graph
            known: dict[str, str] = {}
            for graph in made:
                known |= op_names(graph.traced.module) | {choice.op: choice.op for choice in graph.report.ops}
            check_breaks(self.name, self._request.options.break_at or (), known)
        return made

    def _trace(self, counted: Counted | None, break_names: tuple[str, ...]) -> list[CachedGraph]:
        served = self._stages.tracer.trace_phase(self.name, counted=counted)
        apart = divided(served, self._stages.rewriter, self._stages.buffers)
        return [self._rewrite(each, break_names) for each in apart]

    def _may_count(self) -> bool:
        """Tell whether runs may read Python integers: a device's captured graph would freeze them."""
        lowerings = self._request.device.lowerings
        return self.mode == "compile" and lowerings.resolve(self._request.options.lowering)[0] in lowerings.any_size

    def _all_ways(self, made: list[CachedGraph], break_names: tuple[str, ...]) -> list[CachedGraph]:
        """Return the graphs, plus those for other values of the counters that can be foreseen.

        Raises `TraceError` if too many graphs would be needed.
        """
        counters = {c.source: (c.owner, c.name) for graph in made for c in graph.traced.counters}
        with put_back([counter for graph in made for counter in graph.traced.counters]):
            for _ in range(MAX_WAYS):
                ahead = self._uncovered(made)
                if ahead is None:
                    return made
                for owner, name in counters.values():
                    setattr(owner, name, ahead.get((id(owner), name), getattr(owner, name)))
                with _reached(counters):
                    more = self._trace(counters, break_names)
                if not all(same_structure(graph.traced.output, made[0].traced.output) for graph in more):
                    break
                made = [*made, *more]
        names = ", ".join(counters)
        error = TraceError(
            f"tracing {self.name} of a model that counts on {names}",
            found=f"these numbers make it take more than {MAX_WAYS} ways, or return outputs of other structures",
            remedy="keep them in tensors; or run this phase with mode 'off' (eager)",
        )
        error.keeps_state = True
        raise error

    def _uncovered(self, made: Sequence[CachedGraph]) -> Numbers | None:
        """Return values of the counters to come for which some key has no graph."""
        for key in self._request.table.phases[self.name]:
            views = self._stages.buffers.views(key)
            countings = [graph.traced.counting(views) for graph in made if key in graph.report.buckets]
            ahead = first_uncovered(countings)
            if ahead is not None:
                return ahead
        return None

    def _break_names(self) -> tuple[str, ...]:
        if self._request.options.break_at is not None:
            return self._request.options.break_at
        return tuple(name for name, op in declared_ops().items() if op.break_point)

    def _rewrite(self, given: ServedTrace, break_names: tuple[str, ...]) -> CachedGraph:
        """Run the passes over a trace, then give its ops implementations and mark its break points."""
        traced, served, num_nodes = given.graph, given.keys, len(given.graph.module.graph.nodes)
        log.info("traced %s: %d nodes in %.2f s, %d buckets", self.name, num_nodes, traced.elapsed_s, len(served))
        sizes = [traced.sizes(self._stages.buffers.views(key)) for key in served]
        examples, options = self._served_examples(traced, served), self._request.options
        rewritten = self._stages.rewriter.rewrite(traced, tokens=self._tokens(served), sizes=sizes, examples=examples)
        check_runnable(self.name, rewritten.traced.module)
        providers = options.providers or {}
        start = time.perf_counter()
        with _blaming(rewritten.passes):
            choose = chooser_of(self._request.device, options.deterministic)
            bound, module = bound_constants(rewritten.traced), rewritten.traced.module
            ops = choose(module, self._request.device.ops, mark=break_names, providers=providers, constants=bound)
        for note in unmet(ops, providers):
            self._stages.account.note(note)
        num_breaks = mark_breaks(module, break_names) if break_names else 0
        measured = self._lowering.choose(rewritten.traced, ops, served)
        report = TraceReport(
            phase=self.name,
            num_nodes=num_nodes,
            trace_s=traced.elapsed_s,
            passes_s=rewritten.passes_s,
            aten_s=rewritten.aten_s,
            passes=rewritten.passes,
            ops=ops,
            measured=measured,
            choose_s=time.perf_counter() - start,
            buckets=served,
            reason=given.reason,
            trace_of=given.trace_of,
        )
        return CachedGraph(
            traced=rewritten.traced,
            report=report,
            breaks=num_breaks,
            contents=rewritten.contents,
            sourceless=rewritten.sourceless,
        )

    def _served_examples(self, traced: TracedGraph, served: tuple[GraphKey, ...]) -> list[tuple[Any, ...]]:
        """Return placeholder values of the examples, padded to a bucket if the graph serves only that size."""
        request, found = self._request, []
        for given in request.examples.get(self.name, ()):
            example = {**request.bound, **given}
            sizes: dict[str, int] = {}
            for name, spec in request.inputs.items():
                spec.measure(name, example[name].shape, sizes)
            for wanted in (sizes, *map(request.table.sizes, served)):
                if any(size > wanted[dim] for dim, size in sizes.items()):
                    continue
                padded = {n: s.padded(example[n], wanted) for n, s in request.inputs.items()}
                if traced.why_not_for(padded) is None:
                    found.append(traced.values(padded))
                    break
        if request.options.verify != "off" and not found:
            log.warning("passes on %s (%s) are not verified: none of the examples fits", self.name, served[0])
        return found

    def _tokens(self, served: tuple[GraphKey, ...]) -> tuple[int, int] | None:
        """Return the least and the most tokens that these keys serve; None without a dimension of that name."""
        table = self._request.table
        sizes = [table.sizes(key)["tokens"] for key in served if "tokens" in table.dims]
        return (min(sizes), max(sizes)) if sizes else None


def _aliases(traced: TracedGraph, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return the placeholders' values; tensors as aliases, which keep the memory that a captured graph reads, whatever
    the model's parameters come to point at later."""
    return tuple(v.detach() if isinstance(v, Tensor) else v for v in traced.values(inputs))


@contextmanager
def _reached(counters: Counted) -> Iterator[None]:
    """Have an error say with which values of the counters the model was traced: the caller's may be others."""
    try:
        yield
    except TraceError as error:
        values = " and ".join(f"{source} = {getattr(*counter)}" for source, counter in counters.items())
        found = f"it counts, and a later call begins with {values}; there: {error.found}"
        raise TraceError(error.asked, found=found, remedy=error.remedy) from error


@contextmanager
def _blaming(reports: Sequence[PassReport]) -> Iterator[None]:
    """Say in an error which passes of plugins have changed the graph that could not be lowered or captured."""
    try:
        yield
    except (LoweringError, CaptureError) as error:
        names = [f"{each.name!r} of {each.owner}" for each in reports if each.matched and each.owner != "core"]
        if names:
            error.remedy += f"; or compile with disable_passes: the graph was changed by {', '.join(names)}"
        raise
