"""Phases of a program before capture: what is run under each key, traced or as it is."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from core.common.graphs.backend import BoundCallable, GraphKey, Guards
from core.common.lowering import FlatCallable, LoweringRequest
from core.common.ops.declaration import declared_ops
from core.compilation.arguments import Examples, check_breaks
from core.compilation.cache.program_cache import CachedGraph, ProgramCache
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.pieces import PieceLowering, lower_pieces, mark_breaks, op_names
from core.compilation.capture.plan import Cropper, TracedCropper
from core.compilation.lower_ops import lower_ops
from core.compilation.report import TraceReport
from core.compilation.rewriting import Rewriter
from core.compilation.shared_trace import SharedTrace, copy_graph
from core.compilation.trace.traced import OutputTree, TracedGraph
from core.compilation.trace.tracing import trace
from core.errors import CaptureError, CoreError, LoweringError, TraceError

if TYPE_CHECKING:
    from core.compilation.options import CompileOptions
    from core.compilation.rewrite.pass_report import PassReport
    from core.device import Device, Mode

log = logging.getLogger("core.compilation.compile")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What is captured under one key. values: everything that it reads. output: None until it has run."""

    run: BoundCallable
    values: tuple[Any, ...]
    lower_s: float
    output: Callable[[], OutputTree]
    cropper: Cropper


@dataclass(kw_only=True, slots=True)
class _Kept:
    """A trace for all sizes of some phases under the same constants, as it came.

    traced: None where the model has none for all sizes. usable: by other phases, too. phase: the first that it served,
    whose report accounts for it.
    """

    constants: tuple[object, ...]
    traced: TracedGraph | None
    usable: bool
    phase: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """A traced graph before it is rewritten, and the keys that it serves; the rest is as in `TraceReport`."""

    graph: TracedGraph
    keys: tuple[GraphKey, ...]
    reason: str = ""
    trace_of: str = ""


class TracedPhases:
    """Traces, rewrites and lowers; one trace serves all buckets of a phase where its conditions hold.

    cache: has the graphs of a phase where they were made before. shared: phases that one trace may serve. A graph that
    is to serve a size of 1 among others, or other phases, is traced at sizes of its own; what it does not hold for is
    traced again, at the buckets' sizes.
    """

    def __init__(
        self,
        device: Device,
        options: CompileOptions,
        *,
        rewriter: Rewriter,
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        buffers: StaticBuffers,
        examples: Examples,
        shared: SharedTrace | None = None,
        cache: ProgramCache | None = None,
    ) -> None:
        self._device = device
        self._options = options
        self._rewriter = rewriter
        self._inputs = inputs
        self._table = table
        self._buffers = buffers
        self._examples = examples
        self._shared = shared
        self._cache = cache
        self._kept: list[_Kept] = []
        self.lowering_name, self._lowering = device.lowerings.resolve(options.lowering)
        self._pieces = PieceLowering(self._lowering)
        self._serving: dict[GraphKey, TracedGraph] = {}
        self._lowered: dict[int, FlatCallable] = {}
        self._piecewise: set[GraphKey] = set()
        self.reports: list[TraceReport] = []

    def trace(self, phase: str, model: Callable[..., Any], mode: Mode) -> int:
        """Trace a phase for all its keys; return how many break points its graphs have in a piecewise mode.

        Nothing is traced or rewritten where the cache has the graphs. Raises `TraceError`, with nothing of the phase
        kept, and `UsageError` for a break point that is in none of them.
        """
        cached = self._cache.load(phase, mode) if self._cache is not None else None
        if cached is not None:
            for each in cached:
                self._serve(each)
            return sum(each.breaks for each in cached)
        names = self._break_names() if mode == "piecewise" else ()
        traced: list[_Served] = []
        conditions: dict[Guards, list[GraphKey]] = {}
        for key in self._table.phases[phase]:
            conditions.setdefault(key.guards, []).append(key)
        for guards, keys in conditions.items():
            traced += self._trace_guarded(phase, model, guards, keys)
        made = []
        known: dict[str, str] = {}
        for served in traced:
            made.append(self._rewrite(phase, served, names))
            self._serve(made[-1])
            known |= op_names(made[-1].traced.module) | {choice.op: choice.op for choice in made[-1].report.ops}
        if mode == "piecewise":  # the default names may well be in no graph
            check_breaks(phase, self._options.break_at or (), known)
        if self._cache is not None:
            self._cache.keep(phase, mode, made)
        return sum(each.breaks for each in made)

    def _serve(self, made: CachedGraph) -> None:
        """Take a graph for all keys that it serves."""
        self.reports.append(made.report)
        self._serving.update(dict.fromkeys(made.report.buckets, made.traced))
        self._piecewise.update(made.report.buckets if made.breaks else ())

    def forget(self, phase: str) -> None:
        """Drop the traces of a phase that runs without one after all; of one that it shares, another gives account."""
        heir = next((report.phase for report in self.reports if report.trace_of == phase), "")
        for kept in self._kept:
            kept.phase = heir if kept.phase == phase else kept.phase
        names = {phase: heir, heir: ""}
        self.reports[:] = [
            replace(report, trace_of="" if report.phase == heir else names.get(report.trace_of, report.trace_of))
            for report in self.reports
            if report.phase != phase
        ]
        self._serving = {key: traced for key, traced in self._serving.items() if key.phase != phase}

    def in_parts(self, key: GraphKey) -> bool:
        """Return whether a key's graph was cut at break points."""
        return key in self._piecewise

    def bind(self, key: GraphKey) -> Bound:
        """Lower the graph of a key and bind it to its static inputs."""
        traced, inputs = self._serving[key], self._buffers.views(key)
        start = time.perf_counter()
        # Aliases keep the memory that a captured graph reads, whatever the model's parameters come to point at later.
        values = tuple(v.detach() if isinstance(v, Tensor) else v for v in traced.values(inputs))
        with self.blaming(key):
            lowered = self._lowered.get(id(traced)) or self._lower(key, traced, values)
        if self.lowering_name in self._device.lowerings.any_size:
            self._lowered[id(traced)] = lowered

        def bound() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return lowered(*values)

        return Bound(
            run=bound,
            values=values,
            lower_s=time.perf_counter() - start,
            output=lambda: traced.output,
            cropper=TracedCropper(traced, self._inputs),
        )

    @contextmanager
    def blaming(self, key: GraphKey) -> Iterator[None]:
        """Say in an error which passes of plugins have changed the graph that could not be lowered or captured."""
        with _blaming(next((report.passes for report in self.reports if key in report.buckets), ())):
            yield

    def _break_names(self) -> tuple[str, ...]:
        if self._options.break_at is not None:
            return self._options.break_at
        return tuple(name for name, op in declared_ops().items() if op.break_point)

    def _trace_guarded(
        self, phase: str, model: Callable[..., Any], guards: Guards, keys: Sequence[GraphKey]
    ) -> Iterator[_Served]:
        """Trace for these keys, from the largest on, again for those that the trace before does not hold for."""
        remaining, reason = list(reversed(keys)), ""
        kept = self._kept_for(phase, model, guards)
        general = kept is None or kept.traced is not None
        while remaining:
            shared, kept = (kept if kept is not None and kept.usable else None), None
            if shared is not None and shared.traced is not None and self._shared is not None:
                traced = self._shared.bound(shared.traced, phase)
            elif (found := self._trace_keys(model, guards, remaining) if general else None) is not None:
                traced = found
            else:
                traced = self._trace(model, guards, self._buffers.views(remaining[0]))
            refused = {key: traced.holds_for(self._buffers.views(key)) for key in remaining}
            served = tuple(key for key, why in refused.items() if why is None)
            general = bool(served) or shared is not None
            if served and shared is not None:
                shared.phase = shared.phase or phase
            if served:
                trace_of = shared.phase if shared is not None and shared.phase != phase else ""
                graph = replace(traced, elapsed_s=0.0) if trace_of else traced
                yield _Served(graph=graph, keys=served, reason=reason, trace_of=trace_of)
            remaining = [key for key, why in refused.items() if why is not None]
            reason = next((why for why in refused.values() if why is not None), "")

    def _kept_for(self, phase: str, model: Callable[..., Any], guards: Guards) -> _Kept | None:
        """Return the trace that this phase may share with others, made now where it is the first of them."""
        shared = self._shared
        if shared is None or phase not in shared.values:
            return None
        constants = self._constants(model, dict(guards), tuple(shared.values))
        kept = next((kept for kept in self._kept if kept.constants == constants), None)
        if kept is None:
            traced = self._trace_for(model, guards, [key for each in shared.values for key in self._table.phases[each]])
            usable = traced is not None and shared.calls_have(traced.module, shared.values[phase])
            kept = _Kept(constants=constants, traced=traced, usable=usable)
            self._kept.append(kept)
        return kept

    def _trace_keys(self, model: Callable[..., Any], guards: Guards, keys: Sequence[GraphKey]) -> TracedGraph | None:
        """Return a trace that may serve sizes of 1 beside others; None where there are none, or it can't be made."""
        has_one = any(1 in key.dims for key in keys)
        return self._trace_for(model, guards, keys) if has_one and len(keys) > 1 else None

    def _constants(
        self, model: Callable[..., Any], guards: Mapping[str, object], phases: Sequence[str]
    ) -> tuple[object, ...]:
        """Return what the model is called with for each guard that any of these phases has, and its type."""
        parameters = inspect.signature(model).parameters
        names = sorted({name for phase in phases for name in self._table.guards.get(phase, ())})
        defaults = {name: parameters[name].default for name in names if name in parameters}
        values = {name: guards.get(name, defaults.get(name)) for name in names}
        return tuple((name, type(value), value) for name, value in values.items())

    def _trace_for(self, model: Callable[..., Any], guards: Guards, keys: Sequence[GraphKey]) -> TracedGraph | None:
        """Trace at the most of each dimension, 2 at least, so that no size is special; None where that can't be."""
        sizes = [self._table.sizes(key) for key in keys]
        most = {dim: max(2, *(each[dim] for each in sizes)) for dim in self._table.dims}
        least: Literal[1, 2] = 1 if any(1 in key.dims for key in keys) else 2
        device = self._device.torch_device
        inputs = {
            name: self._buffers.bound[name]
            if name in self._buffers.bound
            else torch.zeros(spec.resolve(most), dtype=spec.dtype, device=device)
            for name, spec in self._inputs.items()
        }
        try:
            return self._trace(model, guards, inputs, least=least)
        except TraceError as error:
            if error.spoiled:
                raise
            log.info("no trace for all sizes: %s", error)
            return None

    def _trace(
        self, model: Callable[..., Any], guards: Guards, inputs: Mapping[str, Tensor], *, least: Literal[1, 2] = 2
    ) -> TracedGraph:
        # Tracing marks dimensions on the tensors it is given, and takes where a tensor lies in its memory for a size of
        # its own: hand it copies of the buffers, and aliases of the caller's tensors, not these themselves.
        examples = {
            name: tensor.view(tensor.shape) if name in self._buffers.bound else tensor.clone()
            for name, tensor in inputs.items()
        }
        dynamic = {
            name: [dim for dim, declared in enumerate(spec.shape) if isinstance(declared, str)]
            for name, spec in self._inputs.items()
        }
        return trace(
            model, examples, dynamic=dynamic, constants=dict(guards), writable=self._buffers.bound, least=least
        )

    def _rewrite(self, phase: str, given: _Served, break_names: tuple[str, ...]) -> CachedGraph:
        traced, served = given.graph, given.keys
        num_nodes = len(traced.module.graph.nodes)
        log.info("traced %s: %d nodes in %.2f s, serves %d buckets", phase, num_nodes, traced.elapsed_s, len(served))
        examples = self._served_examples(phase, traced, served)
        sizes = [traced.sizes(self._buffers.views(key)) for key in served]
        rewritten = self._rewriter.rewrite(traced, tokens=self._tokens(served), sizes=sizes, examples=examples)
        with _blaming(rewritten.passes):
            ops = lower_ops(rewritten.traced.module, self._device.ops, mark=break_names)
        num_breaks = mark_breaks(rewritten.traced.module, break_names)
        report = TraceReport(
            phase=phase,
            num_nodes=num_nodes,
            trace_s=traced.elapsed_s,
            passes_s=rewritten.passes_s,
            aten_s=rewritten.aten_s,
            passes=rewritten.passes,
            ops=ops,
            buckets=served,
            reason=given.reason,
            trace_of=given.trace_of,
        )
        return CachedGraph(traced=rewritten.traced, report=report, breaks=num_breaks, contents=rewritten.contents)

    def _served_examples(self, phase: str, traced: TracedGraph, served: tuple[GraphKey, ...]) -> list[tuple[Any, ...]]:
        """Return placeholder values of the phase's examples, filled up to a bucket where the graph serves only that."""
        found = []
        for given in self._examples.get(phase, ()):
            example = {**self._buffers.bound, **given}
            sizes: dict[str, int] = {}
            for name, spec in self._inputs.items():
                spec.measure(name, example[name].shape, sizes)
            for wanted in (sizes, *map(self._table.sizes, served)):
                fits = all(size <= wanted[dim] for dim, size in sizes.items())
                padded = {n: s.padded(example[n], wanted) for n, s in self._inputs.items()} if fits else {}
                if fits and traced.holds_for(padded) is None:
                    found.append(traced.values(padded))
                    break
        if self._options.verify != "off" and not found:
            log.warning("passes on %s (%s) are not verified: none of the examples fits", phase, served[0])
        return found

    def _tokens(self, served: tuple[GraphKey, ...]) -> tuple[int, int] | None:
        if "tokens" not in self._table.dims:
            return None
        sizes = [self._table.sizes(key)["tokens"] for key in served]
        return min(sizes), max(sizes)

    def _lower(self, key: GraphKey, traced: TracedGraph, values: tuple[Any, ...]) -> FlatCallable:
        graph = copy_graph(traced.module)
        try:
            if key in self._piecewise:
                return lower_pieces(graph, values, self._pieces)
            return self._lowering(LoweringRequest(graph=graph, example_inputs=values))
        except CoreError:
            raise
        except Exception as error:
            raise LoweringError(
                f"lowering {key} by {self.lowering_name!r}",
                found=f"{type(error).__name__}: {error}",
                remedy="use lowering 'inline' to go on without this compiler"
                if "inline" in {*self._device.lowerings.available} - {self.lowering_name}
                else f"run {key.phase} with mode 'off' to see whether it runs eagerly: no compiler is at fault",
            ) from error


@contextmanager
def _blaming(reports: Sequence[PassReport]) -> Iterator[None]:
    try:
        yield
    except (LoweringError, CaptureError) as error:
        names = [
            f"{report.name!r} of {report.owner}" for report in reports if report.matched and report.owner != "core"
        ]
        if names:
            error.remedy += f"; or compile with disable_passes: the graph was changed by {', '.join(names)}"
        raise
