"""Lowers the graph of a phase for each of its buckets, each op with the implementation that is fastest there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx

from core.common.lowering import UNKEPT, Artifacts, FlatCallable, LoweringRequest
from core.common.under_way import Steps, UnderWay, finish
from core.compilation.account import num_ranks
from core.compilation.capture.alike import cuts, divide
from core.compilation.capture.pieces import lower_pieces
from core.compilation.measuring import BucketValues, MeasuredChoice, Measurer
from core.compilation.phases.divided import Divided
from core.compilation.phases.phase import with_values
from core.compilation.shared_trace import copy_graph
from core.compilation.trace.traced import ConstantSlot, InputSlot
from core.errors import CoreError, LoweringError

if TYPE_CHECKING:
    from core.common.graphs.backend import BoundCallable, GraphKey
    from core.compilation.cache.reports import CachedGraph
    from core.compilation.implementations import OpChoice
    from core.compilation.phases.phase import Stages
    from core.compilation.trace.traced import TracedGraph

_Chosen = tuple[tuple[str, str, str], ...]
"""Names of nodes, each with its op and the name of the implementation that it gets."""


class BucketLowering:
    """Lowers the graphs of one phase."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._device = stages.request.device
        self._name, self._lowering = self._device.lowerings.resolve(stages.request.options.lowering)
        options, offered = stages.request.options, self._device.lowerings
        # Ranks that change over at different steps would compute different bits, and then different tokens.
        wanted = options.background and not options.strict and num_ranks() == 1
        self._in_background = wanted and bool(offered.interim) and self._name in offered.begins
        #: Those that run at every size.
        self._known: dict[tuple[int, _Chosen], FlatCallable] = {}
        self._begun: dict[GraphKey, UnderWay[FlatCallable]] = {}

    def choose(
        self, traced: TracedGraph, ops: Sequence[OpChoice], keys: Sequence[GraphKey]
    ) -> tuple[MeasuredChoice, ...]:
        """Begin the kernels of these calls; return what those become, in each bucket, that several implementations
        take, where the program is to measure: they are timed on the device."""
        account, stages, module = self._stages.account, self._stages, traced.module
        asks = stages.ahead.compiles or any(choice.others for choice in ops)
        buckets = {key: self._values(traced, key) for key in keys} if asks else {}
        stages.ahead.begin(module, ops, buckets)
        if not stages.request.options.measure:
            return ()
        measurer = Measurer(self._device, self._artifacts, account.note)
        found = measurer.choose(module, ops, buckets)
        account.num_measured += measurer.num_measured
        return found

    def _values(self, traced: TracedGraph, key: GraphKey) -> BucketValues:
        views, bound = self._stages.buffers.views(key), self._stages.request.bound
        own = [
            isinstance(slot, ConstantSlot) or (isinstance(slot, InputSlot) and slot.name in bound)
            for slot in traced.slots
        ]
        placeholders = traced.module.graph.find_nodes(op="placeholder")
        given = zip(placeholders, traced.values(views), own, strict=True)
        return BucketValues(traced.sizes(views), {node: value for node, value, keep in given if keep})

    def cut(self, graphs: Sequence[CachedGraph]) -> list[CachedGraph]:
        """Return the phase's graphs with the places where those are cut that begin alike.

        None is cut where a compiler's work is not kept, since it would be done again for each that asks.
        """
        cache = self._stages.cache
        kept = self._name in self._device.lowerings.begins and cache is not None and cache.keeps_artifacts
        if not kept or any(graph.breaks or graph.traced.counters for graph in graphs):
            return list(graphs)
        found = cuts([graph.traced for graph in graphs])
        return [replace(graph, cut=cut) for graph, cut in zip(graphs, found, strict=True)]

    def begin(self, key: GraphKey, graph: CachedGraph, values: tuple[Any, ...]) -> None:
        """Begin to lower a graph in one of its buckets, if the lowering's compiler runs by itself; `lower` waits."""
        compiles = self._name in self._device.lowerings.begins
        if compiles and key not in self._begun and not graph.breaks and not self._in_background:
            with self._explained(key):
                self._begun[key] = UnderWay(self._compiled(key, graph, values))

    def abandon(self) -> None:
        """End the compilers of all that was begun and not asked for."""
        while self._begun:
            self._begun.popitem()[1].abandon()

    def bind(self, key: GraphKey, graph: CachedGraph, values: tuple[Any, ...]) -> BoundCallable:
        """Return what runs a graph on these values in one of its buckets; raise `LoweringError` as `lower` does."""
        if not self._in_background or graph.breaks:
            return with_values(self.lower(key, graph, values), values)
        background, given = self._stages.runner.background, (key, graph, values)
        with self._explained(key):
            return background.add(key, partial(self._steps, *given), partial(self._interim, *given))

    def _interim(self, key: GraphKey, graph: CachedGraph, values: tuple[Any, ...]) -> BoundCallable:
        lower = self._device.lowerings.available[self._device.lowerings.interim]
        return with_values(lower(self._lowering_request(graph, key, values)), values)

    def _steps(self, key: GraphKey, graph: CachedGraph, values: tuple[Any, ...]) -> Steps[BoundCallable]:
        how = {"background": True, "note": self._stages.runner.background.note}
        return with_values((yield from self._compiled(key, graph, values, **how)), values)

    def _compiled(self, key: GraphKey, graph: CachedGraph, values: tuple[Any, ...], **how: Any) -> Steps[FlatCallable]:
        """Have a compiler make a graph, in two parts where others of the phase begin like it."""
        begin = self._device.lowerings.begins[self._name]
        if graph.cut is None:
            return (yield from begin(replace(self._lowering_request(graph, key, values, lazy=True), **how)))
        first, end, outputs = divide(self._placed(graph, key, lazy=True), graph.cut)
        where = graph.traced.sizes(self._stages.buffers.views(key)), self._device.torch_device
        given, handed = first.examples(values, *where), end.examples(values, *where)
        begun = yield from begin(replace(self._request(first.graph, first.graph, given), **how))
        ended: FlatCallable = end.graph.forward
        if not end.is_short(handed):
            ended = yield from begin(replace(self._request(end.graph, end.graph, handed), **how))
        return Divided((begun, first), (ended, end), outputs, handed)

    def lower(self, key: GraphKey, graph: CachedGraph, values: tuple[Any, ...]) -> FlatCallable:
        """Return what runs a graph in one of its buckets; raise `LoweringError` with what to do instead."""
        chosen = _chosen(key, graph.report.measured)
        lowered = self._known.get((id(graph.traced), chosen))
        if lowered is not None:
            return lowered
        with self._explained(key):
            begun = self._begun.pop(key, None)
            lowered = self._lower(graph, key, values) if begun is None else begun.finish()
        if self._name in self._device.lowerings.any_size:
            self._known[id(graph.traced), chosen] = lowered
        return lowered

    @contextmanager
    def _explained(self, key: GraphKey) -> Iterator[None]:
        """Turn an error that is not the project's own into a `LoweringError`."""
        try:
            yield
        except CoreError:
            raise
        except Exception as error:
            raise LoweringError(
                f"lowering {key} by {self._name!r}",
                found=f"{type(error).__name__}: {error}",
                remedy="use lowering 'inline' to go on without this compiler"
                if "inline" in {*self._device.lowerings.available} - {self._name}
                else f"run {key.phase} with mode 'off' to see whether it runs eagerly: no compiler is at fault",
            ) from error

    def _lower(self, graph: CachedGraph, key: GraphKey, values: tuple[Any, ...]) -> FlatCallable:
        if graph.breaks:
            return lower_pieces(self._placed(graph, key), values, self._stages.pieces)
        if graph.cut is not None:
            return finish(self._compiled(key, graph, values))
        return self._lowering(self._lowering_request(graph, key, values))

    def _lowering_request(
        self, graph: CachedGraph, key: GraphKey, values: tuple[Any, ...], *, lazy: bool = False
    ) -> LoweringRequest:
        """Return a request with a copy of the graph. lazy: its Python is written if it is called; a compiler that
        finds its work done reads the nodes alone."""
        placed = self._placed(graph, key, lazy=lazy)
        return self._request(placed, placed if graph.report.measured else graph.traced.module, values)

    def _placed(self, graph: CachedGraph, key: GraphKey, *, lazy: bool = False) -> fx.GraphModule:
        """Return a copy of the graph with the implementations that its calls get in a bucket."""
        copy = copy_graph(graph.traced.module, lazy=lazy)
        self._place(copy, _chosen(key, graph.report.measured))
        return copy

    def _request(self, graph: fx.GraphModule, like: fx.GraphModule, values: tuple[Any, ...]) -> LoweringRequest:
        """Return a request for this graph. like: what files are kept by; a copy of it where it is the graph itself,
        since the lowering changes that."""
        kept = self._artifacts(copy_graph(like, lazy=True) if like is graph else like, values)
        return LoweringRequest(graph=graph, example_inputs=values, artifacts=kept, note=self._stages.account.note)

    def _place(self, graph: fx.GraphModule, chosen: _Chosen) -> None:
        """Put implementations into a graph."""
        known = {(each.op, each.name): each.fn for each in self._device.ops}
        nodes = {node.name: node for node in graph.graph.nodes} if chosen else {}
        for name, op, implementation in chosen:
            nodes[name].target = known[op, implementation]
        if chosen:
            graph.recompile()

    def _artifacts(self, graph: fx.GraphModule, values: tuple[Any, ...]) -> Artifacts:
        cache = self._stages.cache
        return UNKEPT if cache is None else cache.artifacts(graph, values)


def _chosen(key: GraphKey, measured: Sequence[MeasuredChoice]) -> _Chosen:
    return tuple((name, each.op, each.implementation) for each in measured if each.bucket == key for name in each.nodes)
