"""Phases of a program before capture: what is run under each key, traced or as it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.arguments import Examples, check_breaks
from core.common.graphs.backend import BoundCallable, GraphKey, Guards
from core.common.graphs.buffers import StaticBuffers
from core.common.graphs.inputs import BucketTable, InputSpec
from core.common.graphs.pieces import PieceLowering, lower_pieces, mark_breaks, op_names
from core.common.graphs.plan import Cropper, TracedCropper
from core.common.lowering import FlatCallable, LoweringRequest
from core.common.ops.declaration import declared_ops
from core.common.ops.lower import lower_ops
from core.common.report import TraceReport
from core.common.traced import OutputTree, TracedGraph
from core.common.tracing import trace
from core.errors import CaptureError, CoreError, LoweringError
from core.rewriting import Rewriter

if TYPE_CHECKING:
    from core.common.config import CompileOptions
    from core.common.passes.manager import PassReport
    from core.device import Device, Mode

log = logging.getLogger("core.compilation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What is captured under one key. values: everything that it reads. output: None until it has run."""

    run: BoundCallable
    values: tuple[Any, ...]
    lower_s: float
    output: Callable[[], OutputTree]
    cropper: Cropper


class TracedPhases:
    """Traces, rewrites and lowers; one trace serves all buckets of a phase where its conditions hold."""

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
    ) -> None:
        self._device = device
        self._options = options
        self._rewriter = rewriter
        self._inputs = inputs
        self._table = table
        self._buffers = buffers
        self._examples = examples
        self.lowering_name, self._lowering = device.lowerings.resolve(options.lowering)
        self._pieces = PieceLowering(self._lowering)
        self._serving: dict[GraphKey, TracedGraph] = {}
        self._lowered: dict[int, FlatCallable] = {}
        self._piecewise: set[GraphKey] = set()
        self.reports: list[TraceReport] = []

    def trace(self, phase: str, model: Callable[..., Any], mode: Mode) -> int:
        """Trace a phase for all its keys; return how many break points its graphs have in a piecewise mode.

        Raises `TraceError`, with nothing of the phase kept, and `UsageError` for a break point that is in none of them.
        """
        names = self._break_names() if mode == "piecewise" else ()
        traced: list[tuple[TracedGraph, tuple[GraphKey, ...], str]] = []
        conditions: dict[Guards, list[GraphKey]] = {}
        for key in self._table.phases[phase]:
            conditions.setdefault(key.guards, []).append(key)
        for guards, keys in conditions.items():
            traced += self._trace_guarded(model, guards, keys)
        num_breaks = 0
        known: dict[str, str] = {}
        for graph, served, reason in traced:
            rewritten, breaks = self._rewrite(phase, graph, served, reason, names)
            known |= op_names(rewritten.module) | {choice.op: choice.op for choice in self.reports[-1].ops}
            num_breaks += breaks
            self._serving.update(dict.fromkeys(served, rewritten))
            self._piecewise.update(served if breaks else ())
        if mode == "piecewise":  # the default names may well be in no graph
            check_breaks(phase, self._options.break_at or (), known)
        return num_breaks

    def forget(self, phase: str) -> None:
        """Drop the traces of a phase that runs without one after all."""
        self.reports[:] = [report for report in self.reports if report.phase != phase]
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
        self, model: Callable[..., Any], guards: Guards, keys: Sequence[GraphKey]
    ) -> Iterator[tuple[TracedGraph, tuple[GraphKey, ...], str]]:
        """Trace for these keys, from the largest on, again for those that the trace before does not hold for."""
        remaining, reason = list(reversed(keys)), ""
        while remaining:
            traced = self._trace(model, guards, self._buffers.views(remaining[0]))
            refused = {key: traced.holds_for(self._buffers.views(key)) for key in remaining[1:]}
            served = (remaining[0], *(key for key, why in refused.items() if why is None))
            yield traced, served, reason
            remaining = [key for key, why in refused.items() if why is not None]
            reason = next((why for why in refused.values() if why is not None), "")

    def _trace(self, model: Callable[..., Any], guards: Guards, inputs: Mapping[str, Tensor]) -> TracedGraph:
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
        return trace(model, examples, dynamic=dynamic, constants=dict(guards), writable=self._buffers.bound)

    def _rewrite(
        self, phase: str, traced: TracedGraph, served: tuple[GraphKey, ...], reason: str, break_names: tuple[str, ...]
    ) -> tuple[TracedGraph, int]:
        num_nodes = len(traced.module.graph.nodes)
        log.info("traced %s: %d nodes in %.2f s, serves %d buckets", phase, num_nodes, traced.elapsed_s, len(served))
        examples = self._served_examples(phase, traced, served)
        rewritten = self._rewriter.rewrite(traced, tokens=self._tokens(served), examples=examples)
        with _blaming(rewritten.passes):
            ops = lower_ops(rewritten.traced.module, self._device.ops, mark=break_names)
        num_breaks = mark_breaks(rewritten.traced.module, break_names)
        self.reports.append(
            TraceReport(
                phase=phase,
                num_nodes=num_nodes,
                trace_s=traced.elapsed_s,
                passes_s=rewritten.passes_s,
                aten_s=rewritten.aten_s,
                passes=rewritten.passes,
                ops=ops,
                buckets=served,
                reason=reason,
            )
        )
        return rewritten.traced, num_breaks

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
        graph = _copy(traced.module)
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
                remedy="use lowering 'inline' to go on without this compiler",
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


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph but not the tensors it is bound to, so that a lowering may change it."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, copied)
