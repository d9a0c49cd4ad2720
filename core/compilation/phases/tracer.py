"""Which traces the phases of a program need: one for all buckets, and for other phases too, where its conditions hold.

A trace that is to serve a size of 1 among others, or other phases, is made at sizes of its own. Buckets that it does
not serve are traced again, at their own sizes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from core.compilation.shared_trace import SharedTrace
from core.compilation.trace.strides import stride_dependence
from core.compilation.trace.tracing import trace
from core.errors import TraceError

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import GraphKey, KeyGuards
    from core.compilation.capture.buffers import StaticBuffers
    from core.compilation.request import CompileRequest, Model
    from core.compilation.trace.counters import Counted
    from core.compilation.trace.traced import TracedGraph

log = logging.getLogger("core.compilation.compile")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTrace:
    """A traced graph before it is rewritten; `reason` and `trace_of` are as in `TraceReport`."""

    graph: TracedGraph
    #: The keys that it serves.
    keys: tuple[GraphKey, ...]
    reason: str = ""
    trace_of: str = ""


@dataclass(kw_only=True, slots=True)
class _Kept:
    """Dynamo's trace for all sizes of the phases that share it."""

    #: The guards' values that it was made with.
    constants: tuple[object, ...]
    #: None if the model has no trace for all sizes.
    traced: TracedGraph | None
    #: Whether other phases may use the trace.
    usable: bool
    #: The first phase that it served, whose report accounts for it.
    phase: str = ""


class Tracer:
    """Traces the phases of one program, and keeps the traces that several of them share."""

    def __init__(self, request: CompileRequest, buffers: StaticBuffers) -> None:
        self._request = request
        self._table = request.table
        self._shared = request.options.shared
        self._buffers = buffers
        self._kept: list[_Kept] = []
        #: Traces of several values of a guard, by all that they were made with; None where values can't share one.
        self._of_values: dict[Any, TracedGraph | None] = {}
        self._phase = ""
        self._counted: Counted | None = None

    def trace_phase(self, phase: str, *, counted: Counted | None = None) -> list[ServedTrace]:
        """Trace a phase for all its keys; raise `TraceError` where that can't be. counted: as for `trace`."""
        self._phase, self._counted = phase, counted
        conditions: dict[KeyGuards, list[GraphKey]] = {}
        for key in self._table.phases[phase]:
            conditions.setdefault(key.guards, []).append(key)
        return [served for guards, keys in conditions.items() for served in self._trace_guarded(phase, guards, keys)]

    def forget(self, phase: str) -> None:
        """Let another phase account for the shared traces of this one, which runs without a trace after all."""
        for kept in self._kept:
            kept.phase = "" if kept.phase == phase else kept.phase

    def _trace_guarded(self, phase: str, guards: KeyGuards, keys: Sequence[GraphKey]) -> Iterator[ServedTrace]:
        """Trace for these keys, from the largest on; keys that a trace does not serve are traced again."""
        model = self._request.models[phase]
        remaining, reason = list(reversed(keys)), ""
        kept = self._kept_for(phase, guards)
        general = kept is None or kept.traced is not None
        while remaining:
            shared, kept = (kept if kept is not None and kept.usable else None), None
            if shared is not None and shared.traced is not None and self._shared is not None:
                traced = self._shared.for_phase(shared.traced, phase)
            elif (found := self._trace_keys(model, guards, remaining) if general else None) is not None:
                traced = found
            else:
                traced = self._trace(model, guards, self._buffers.views(remaining[0]))
            refused = {key: traced.why_not_for(self._buffers.views(key)) for key in remaining}
            served = tuple(key for key, why in refused.items() if why is None)
            general = bool(served) or shared is not None
            if served and shared is not None:
                shared.phase = shared.phase or phase
            if served:
                trace_of = shared.phase if shared is not None and shared.phase != phase else ""
                trace_of = trace_of or (phase if traced.elapsed_s == 0 else "")  # made for other values of its guard
                graph = replace(traced, elapsed_s=0.0) if trace_of else traced
                yield ServedTrace(graph=graph, keys=served, reason=reason, trace_of=trace_of)
            remaining = [key for key, why in refused.items() if why is not None]
            reason = next((why for why in refused.values() if why is not None), "")

    def _kept_for(self, phase: str, guards: KeyGuards) -> _Kept | None:
        """Return the trace that this phase may share with others, made now where it is the first of them."""
        shared, model = self._shared, self._request.models[phase]
        if shared is None or phase not in shared.values:
            return None
        constants = self._constants(shared, model, dict(guards))
        kept = next((kept for kept in self._kept if kept.constants == constants), None)
        if kept is None:
            traced = self._trace_for(model, guards, [key for each in shared.values for key in self._table.phases[each]])
            usable = traced is not None and shared.calls_have(traced.module, shared.values[phase])
            kept = _Kept(constants=constants, traced=traced, usable=usable)
            self._kept.append(kept)
        return kept

    def _constants(self, shared: SharedTrace, model: Model, guards: Mapping[str, object]) -> tuple[object, ...]:
        """Return, for each guard of the sharing phases, the value that the model is called with, and its type."""
        parameters = inspect.signature(model).parameters
        names = sorted({name for phase in shared.values for name in self._table.guards.get(phase, ())})
        defaults = {name: parameters[name].default for name in names if name in parameters}
        values = {name: guards.get(name, defaults.get(name)) for name in names}
        return tuple((name, type(value), value) for name, value in values.items())

    def _trace_keys(self, model: Model, guards: KeyGuards, keys: Sequence[GraphKey]) -> TracedGraph | None:
        """Return a trace that may serve sizes of 1 beside others; None where there are none, or it can't be made."""
        has_one = any(1 in key.dims for key in keys)
        return self._trace_for(model, guards, keys) if has_one and len(keys) > 1 else None

    def _trace_for(self, model: Model, guards: KeyGuards, keys: Sequence[GraphKey]) -> TracedGraph | None:
        """Trace at the most of each dimension, 2 at least, so that no size is special; None where that can't be."""
        sizes = [self._table.sizes(key) for key in keys]
        most = {dim: max(2, *(each[dim] for each in sizes)) for dim in self._table.dims}
        least: Literal[1, 2] = 1 if any(1 in key.dims for key in keys) else 2
        bound, device = self._request.bound, self._request.device.torch_device
        inputs = {
            name: bound[name] if name in bound else torch.zeros(spec.resolve(most), dtype=spec.dtype, device=device)
            for name, spec in self._request.inputs.items()
        }
        try:
            return self._trace(model, guards, inputs, least=least)
        except TraceError as error:
            log.info("no trace for all sizes: %s", error)
            return None

    def _trace(
        self, model: Model, guards: KeyGuards, inputs: Mapping[str, Tensor], *, least: Literal[1, 2] = 2
    ) -> TracedGraph:
        """Trace the phase, or take what it needs of a trace that was made for other values of its guard too."""
        shared, constants = self._request.options.shared_guard, dict(guards)
        shares = shared is not None and shared.name in constants and constants[shared.name] in shared.values
        if shared is None or not shares or self._counted:
            return self._trace_now(model, constants, inputs, least)
        of_all = constants | {shared.name: shared.values}
        shapes = tuple((name, tensor.shape) for name, tensor in inputs.items())
        typed = tuple((name, type(value), value) for name, value in of_all.items())
        made_with = self._phase, typed, shapes, least, self._counted is None
        is_new = made_with not in self._of_values
        if is_new:
            traced = self._trace_now(model, of_all, inputs, least)
            why = shared.why_not(traced)
            self._of_values[made_with] = None if why else traced
            log.info("values of %s are traced apart: %s", shared.name, why) if why else None
        known = self._of_values[made_with]
        if known is None:
            return self._trace_now(model, constants, inputs, least)
        mine = shared.for_value(known, constants[shared.name])
        return mine if is_new else replace(mine, elapsed_s=0.0)

    def _trace_now(
        self, model: Model, constants: Mapping[str, Any], inputs: Mapping[str, Tensor], least: Literal[1, 2]
    ) -> TracedGraph:
        # Tracing marks dimensions on the tensors it is given, and takes where a tensor lies in its memory for a size of
        # its own: hand it copies of the buffers, and aliases of the caller's tensors, not these themselves.
        bound = self._request.bound
        examples = {
            name: tensor.view(tensor.shape) if name in bound else tensor.clone() for name, tensor in inputs.items()
        }
        dynamic = {
            name: [dim for dim, declared in enumerate(spec.shape) if isinstance(declared, str)]
            for name, spec in self._request.inputs.items()
        }
        options: Any = {"dynamic": dynamic, "constants": constants, "writable": bound, "least": least}
        found = trace(model, examples, counted=self._counted, **options)
        depends = "" if self._request.device.capabilities.keeps_strides else stride_dependence(found.module)
        if depends:
            raise TraceError(
                f"tracing for {self._request.device.name!r}, whose results may have other strides than their fakes",
                found=depends,
                remedy="make the value contiguous first, or run this phase with mode 'segmented' or 'off'",
            )
        return found
