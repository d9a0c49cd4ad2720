"""`core.compile`: the way from a model to a `Program`, readable top to bottom.

trace -> passes (and ATen, if one needs it) -> lower canonical ops -> lower the graph -> capture, largest bucket first
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core.arguments import (
    Examples,
    check_ops,
    check_signature,
    check_training_mode,
    examples_per_phase,
    models_per_phase,
)
from core.common.config import CompileOptions, Verify
from core.common.graphs.backend import CallBackend, GraphBackend, GraphKey
from core.common.graphs.inputs import Buckets, BucketTable, InputSpec, StaticBuffers
from core.common.lowering import FlatCallable, LoweringRequest
from core.common.ops.lower import lower_ops
from core.common.passes.manager import PassReport
from core.common.passes.switches import PassSwitches
from core.common.report import BucketReport, ProgramReport, TraceReport
from core.common.traced import TracedGraph
from core.common.tracing import trace
from core.device import Device, Mode
from core.errors import CaptureError, CoreError, LoweringError, UsageError
from core.host import select_device
from core.program import CapturedBucket, Program
from core.rewriting import Rewriter

log = logging.getLogger("core.compilation")
Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)` while buckets are captured."""


def compile(
    model: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    device: str | Device = "auto",
    *,
    inputs: Mapping[str, InputSpec],
    buckets: Buckets | None = None,
    mode: Mode | Mapping[str, Mode] | None = None,
    lowering: str | None = None,
    passes: tuple[str, ...] | None = None,
    disable_passes: tuple[str, ...] = (),
    enable_passes: tuple[str, ...] = (),
    strict: bool = False,
    verify: Verify = "off",
    examples: Examples | Sequence[Mapping[str, Tensor]] | None = None,
    progress: Progress | None = None,
) -> Program:
    """Compile a model for a device and return the `Program` that runs it.

    model: a module or function called with the declared inputs by name, its tensors already on the device; or one per
    phase. inputs: name -> `InputSpec`; a named dimension is padded, so read there what that assumes. buckets: sizes of
    the bucket dimensions to capture, as a list, or a list per phase; None for inputs of fixed shape. mode, lowering,
    passes, disable_passes, enable_passes, strict, verify: see `CompileOptions`. examples: sets of inputs by name, per
    phase or for a single phase, on which `verify` judges the passes. A bucket dimension named "tokens" tells passes
    with a token range how many tokens a graph serves.

    The model runs at least once per bucket during capture, on inputs full of zeros (or of their sentinel): in-place
    writes go where these point. Weights and buffers are bound: writing into them is seen, assigning others
    (`load_state_dict(assign=True)`, `model.half()`) is not. A model that assigns to attributes in its forward is
    refused. Ambient modes of torch (autocast) apply at each call of a lowering that runs torch ops, such as `inline`.
    Raises `CoreError` subclasses: `UsageError`, `TraceError`, `PassError`, `LoweringError`, `CaptureError`.
    """
    if not isinstance(device, (str, Device)):
        raise UsageError(
            f"compiling for {device!r}",
            found=f"a {type(device).__name__}",
            remedy="pass a device name such as 'auto', or a Device from core.select_device",
        )
    options = CompileOptions(
        mode=mode,
        lowering=lowering,
        passes=passes,
        disable_passes=disable_passes,
        enable_passes=enable_passes,
        strict=strict,
        verify=verify,
    )
    resolved = device if isinstance(device, Device) else select_device(device)
    table = BucketTable.build(inputs, buckets)
    # Tensors made in inference mode could never be written outside of it, and buffers are written at every call.
    with torch.inference_mode(False):
        return _Compilation(model, resolved, inputs, table, options, examples, progress).run()


class _Compilation:
    """One run of the pipeline; holds what its stages share."""

    def __init__(
        self,
        model: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        device: Device,
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        options: CompileOptions,
        examples: Examples | Sequence[Mapping[str, Tensor]] | None,
        progress: Progress | None,
    ) -> None:
        self.device = device
        self.inputs = inputs
        self.table = table
        self.models = models_per_phase(model, table)
        for each in self.models.values():
            check_signature(each, inputs)
            check_training_mode(each)
        _check_phases(options.mode, table)
        self.modes = {phase: options.mode_of(phase, device.capabilities.modes) for phase in table.phases}
        self.lowering_name, self.lowering = device.lowerings.resolve(options.lowering)
        check_ops(device)
        self.rewriter = Rewriter(
            device,
            PassSwitches(only=options.passes, disable=options.disable_passes, enable=options.enable_passes),
            strict=options.strict,
            verify=options.verify,
        )
        self.examples = examples_per_phase(examples, inputs, self.modes, options.verify)
        self.options = options
        self.progress = progress or (lambda what, done, total: None)
        self.traces: list[TraceReport] = []
        self.buckets: list[BucketReport] = []

    def run(self) -> Program:
        """Trace, rewrite, lower and capture every phase that is not "off"."""
        start = time.perf_counter()
        compiled = {phase: keys for phase, keys in self.table.phases.items() if self.modes[phase] != "off"}
        buffers = StaticBuffers(self.inputs, self.table, self.device.torch_device) if compiled else None
        backend = self.device.graph_backend() if compiled else CallBackend()
        captured: dict[GraphKey, CapturedBucket] = {}
        if buffers is not None:
            try:
                captured = self._capture_all(self._trace_all(compiled, buffers), buffers, backend)
            except BaseException:
                backend.cleanup()
                raise
        return Program(
            device=self.device,
            eager={phase: model for phase, model in self.models.items() if self.modes[phase] == "off"},
            inputs=self.inputs,
            table=self.table,
            buffers=buffers,
            backend=backend,
            captured=captured,
            report=self._report(buffers, time.perf_counter() - start),
        )

    def _trace_all(
        self, phases: Mapping[str, tuple[GraphKey, ...]], buffers: StaticBuffers
    ) -> dict[GraphKey, TracedGraph]:
        """Give each key the trace that serves it; one trace serves all buckets of a phase where its conditions hold."""
        serving: dict[GraphKey, TracedGraph] = {}
        for phase, keys in phases.items():
            remaining, reason = list(reversed(keys)), ""
            while remaining:
                traced = self._trace(phase, buffers.views(remaining[0]))
                refused = {key: traced.holds_for(buffers.views(key)) for key in remaining[1:]}
                served = [remaining[0], *(key for key, why in refused.items() if why is None)]
                serving.update(dict.fromkeys(served, self._rewrite(phase, traced, tuple(served), reason)))
                remaining = [key for key, why in refused.items() if why is not None]
                reason = next((why for why in refused.values() if why is not None), "")
        return serving

    def _trace(self, phase: str, inputs: Mapping[str, Tensor]) -> TracedGraph:
        # Tracing marks dimensions on the tensors it is given: hand it aliases, not the buffers themselves.
        examples = {name: tensor.view(tensor.shape) for name, tensor in inputs.items()}
        dynamic = {
            name: [dim for dim, declared in enumerate(spec.shape) if isinstance(declared, str)]
            for name, spec in self.inputs.items()
        }
        return trace(self.models[phase], examples, dynamic=dynamic)

    def _rewrite(self, phase: str, traced: TracedGraph, served: tuple[GraphKey, ...], reason: str) -> TracedGraph:
        num_nodes = len(traced.module.graph.nodes)
        log.info("traced %s: %d nodes in %.2f s, serves %d buckets", phase, num_nodes, traced.elapsed_s, len(served))
        examples = self._served_examples(phase, traced, served)
        rewritten = self.rewriter.rewrite(traced, tokens=self._tokens(served), examples=examples)
        with _blaming(rewritten.passes):
            ops = lower_ops(rewritten.traced.module, self.device.ops)
        self.traces.append(
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
        return rewritten.traced

    def _served_examples(self, phase: str, traced: TracedGraph, served: tuple[GraphKey, ...]) -> list[tuple[Any, ...]]:
        """Return placeholder values of the phase's examples, filled up to a bucket where the graph serves only that."""
        found = []
        for example in self.examples.get(phase, ()):
            sizes: dict[str, int] = {}
            for name, spec in self.inputs.items():
                spec.measure(name, example[name].shape, sizes)
            for wanted in (sizes, *map(self.table.sizes, served)):
                fits = all(size <= wanted[dim] for dim, size in sizes.items())
                padded = {n: s.padded(example[n], wanted) for n, s in self.inputs.items()} if fits else {}
                if fits and traced.holds_for(padded) is None:
                    found.append(traced.values(padded))
                    break
        if self.options.verify != "off" and not found:
            log.warning("passes on %s (%s) are not verified: none of the examples fits", phase, served[0])
        return found

    def _tokens(self, served: tuple[GraphKey, ...]) -> tuple[int, int] | None:
        if "tokens" not in self.table.dims:
            return None
        sizes = [self.table.sizes(key)["tokens"] for key in served]
        return min(sizes), max(sizes)

    def _capture_all(
        self, serving: Mapping[GraphKey, TracedGraph], buffers: StaticBuffers, backend: GraphBackend
    ) -> dict[GraphKey, CapturedBucket]:
        captured = {}
        # Largest first: later captures then fit into memory that the first one took.
        order = sorted(serving, key=lambda key: (-max(key.dims, default=1), key))
        shared: dict[int, FlatCallable] = {}
        with torch.no_grad(), _frozen_gc(), backend.capture_session():
            for done, key in enumerate(order):
                self.progress(f"capture {key}", done, len(order))
                with _blaming(next(trace.passes for trace in self.traces if key in trace.buckets)):
                    captured[key] = self._capture(key, serving[key], buffers.views(key), backend, shared)
            self.progress("capture", len(order), len(order))
        return captured

    def _capture(
        self,
        key: GraphKey,
        traced: TracedGraph,
        inputs: Mapping[str, Tensor],
        backend: GraphBackend,
        shared: dict[int, FlatCallable],
    ) -> CapturedBucket:
        start = time.perf_counter()
        # Aliases keep the memory that a captured graph reads, whatever the model's parameters come to point at later.
        values = tuple(v.detach() if isinstance(v, Tensor) else v for v in traced.values(inputs))
        lowered = shared.get(id(traced)) or self._lower(key, traced, values)
        if self.lowering_name in self.device.lowerings.any_size:
            shared[id(traced)] = lowered
        lower_s = time.perf_counter() - start

        def bound() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return lowered(*values)

        before = self.device.parts.memory().used_bytes
        start = time.perf_counter()
        try:
            outputs = backend.capture_one(key, bound, inputs, _no_op)
            self.device.synchronize()
        except CoreError as error:
            error.add_note(f"while capturing {key} on {self.device.name}")
            raise
        except Exception as error:
            raise CaptureError(
                f"capturing {key} on {self.device.name}",
                found=f"{type(error).__name__}: {error}",
                remedy="run this phase with mode 'off' to see whether it runs eagerly; host reads can't be captured",
            ) from error
        used = self.device.parts.memory().used_bytes - before
        self.buckets.append(
            BucketReport(key=key, lower_s=lower_s, capture_s=time.perf_counter() - start, num_bytes=max(used, 0))
        )
        return CapturedBucket(
            key=key,
            inputs=inputs,
            traced=traced,
            output=traced.output,
            views_of_inputs=_views(outputs, inputs),
            values=values,
        )

    def _lower(self, key: GraphKey, traced: TracedGraph, values: tuple[Any, ...]) -> FlatCallable:
        request = LoweringRequest(graph=_copy(traced.module), example_inputs=values)
        try:
            return self.lowering(request)
        except CoreError:
            raise
        except Exception as error:
            raise LoweringError(
                f"lowering {key} by {self.lowering_name!r}",
                found=f"{type(error).__name__}: {error}",
                remedy="use lowering 'inline' to go on without this compiler",
            ) from error

    def _report(self, buffers: StaticBuffers | None, total_s: float) -> ProgramReport:
        return ProgramReport(
            device=self.device.name,
            plugin=str(self.device.plugin),
            modes=dict(self.modes),
            lowering=self.lowering_name,
            traces=tuple(self.traces),
            buckets=tuple(self.buckets),
            static_bytes=buffers.num_bytes if buffers is not None else 0,
            total_s=total_s,
        )


def _views(outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return which outputs lie in the memory of an input buffer, which every bucket writes at every call."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    return tuple(i for i, output in enumerate(outputs) if output.untyped_storage().data_ptr() in storages)


@contextmanager
def _blaming(reports: Sequence[PassReport]) -> Iterator[None]:
    """Say in an error which passes of plugins have changed the graph that could not be lowered or captured."""
    try:
        yield
    except (LoweringError, CaptureError) as error:
        names = [
            f"{report.name!r} of {report.owner}" for report in reports if report.matched and report.owner != "core"
        ]
        if names:
            error.remedy += f"; or compile with disable_passes: the graph was changed by {', '.join(names)}"
        raise


def _no_op() -> None:
    return None


def _check_phases(mode: Mode | Mapping[str, Mode] | None, table: BucketTable) -> None:
    unknown = sorted(mode.keys() - table.phases.keys()) if isinstance(mode, Mapping) else []
    if unknown:
        raise UsageError(
            f"modes for phases {unknown}",
            found=f"the buckets name the phases {sorted(table.phases)}",
            remedy="name only these; a phase without a mode takes the device's preferred one",
        )


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph but not the tensors it is bound to, so that a lowering may change it."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, copied)


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """Keep the collector from running during capture: a finaliser that touches the device would end up in a graph."""
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if not was_frozen:  # else unfreezing would take in what the caller froze
            gc.unfreeze()
