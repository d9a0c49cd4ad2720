"""The way from a request to a `Program`, readable top to bottom.

trace -> passes (on ATen ops too, if one needs it) -> choose implementations of canonical ops -> lower the graph, which
makes a callable of it -> capture, largest bucket first
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from core.common.collector import paused
from core.common.graphs.backend import CallBackend
from core.common.kernel_compilers import counting_kernels
from core.compilation.account import Account, on_first_rank, reason_of
from core.compilation.cache.program_cache import ProgramCache
from core.compilation.capture.background import MAX_AT_ONCE
from core.compilation.capture.breaks import modules_of
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.pieces import PieceLowering
from core.compilation.capture.plan import CapturedBucket
from core.compilation.capture.runner import GraphRunner
from core.compilation.capture.watch import Watched, watch_modules
from core.compilation.phases.ahead import KernelsAhead
from core.compilation.phases.phase import Phase, Stages
from core.compilation.phases.traced_phase import TracedPhase
from core.compilation.phases.tracer import Tracer
from core.compilation.phases.untraced_phase import UntracedPhase
from core.compilation.program import Program
from core.compilation.request import TRACED_MODES, CompileRequest
from core.compilation.rewriting import Rewriter
from core.compilation.weights import Weights
from core.errors import CaptureError, GraphResourcesError, TraceError
from core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import GraphKey, KeyGuards
    from core.compilation.options import CompileOptions
    from core.device import Mode

    #: A phase that is ready to be captured, its keys, and the modes to try where it can't be captured.
    _Prepared = tuple[Phase, tuple[GraphKey, ...], tuple[Mode, ...]]

log = logging.getLogger("core.compilation.compile")


def make_program(request: CompileRequest) -> Program:
    """Trace, rewrite, lower and capture every phase that is not "off"."""
    account = Account()
    rewriter = rewriter_of(request)  # a misspelt pass is refused before anything runs
    # Tensors made in inference mode could never be written outside of it, and buffers are written at every call.
    with torch.inference_mode(False):
        if all(mode == "off" for mode in request.preferred.values()):
            runner = GraphRunner(request.device, CallBackend(), strict=request.options.strict)
            report = account.report(request, request.preferred)
            relocate(request.options, ())
            weights = Weights(request.models.values(), captured=False)
            return Program(request, report, runner=runner, weights=weights)
        stages = make_stages(request, account, rewriter)
        try:
            # Traces make some hundred thousand objects and keep most: the collector would walk all of these, and the
            # whole process, again and again. A capture session begins with a collection.
            with paused(), counting_kernels(request.device.kernel_compilers) as count:
                phases, captured = _Pipeline(stages).run()
                account.num_kernels = count()
                account.num_ahead, account.ahead_s = stages.ahead.num_kernels, stages.ahead.wait_s
                if stages.cache is not None:
                    stages.cache.save()
        except BaseException:
            stages.runner.cleanup()
            raise
    modes = {name: phase.mode for name, phase in phases.items()}
    graphs = [graph for phase in phases.values() for graph in phase.graphs]
    traces = [graph.report for graph in graphs]
    cache = None if stages.cache is None else stages.cache.report
    report = account.report(request, modes, traces, static_bytes=stages.buffers.num_bytes, cache=cache)
    weights = Weights(
        request.models.values(),
        captured=bool(captured),
        contents=(tensor for graph in graphs for tensor in graph.contents),
        sourceless=(name for graph in graphs for name in graph.sourceless),
    )
    stages.runner.background.start()
    return Program(request, report, runner=stages.runner, weights=weights, buffers=stages.buffers, captured=captured)


def relocate(options: CompileOptions, phases: Iterable[Phase]) -> None:
    """Let the caller move the constants of these phases' graphs."""
    if options.relocate is not None:
        found = {id(tensor): tensor for phase in phases for graph in phase.graphs for tensor in graph.tensors}
        options.relocate(tuple(found.values()))


def rewriter_of(request: CompileRequest) -> Rewriter:
    """Return the object that runs the requested passes; raise `UsageError` for unknown names of passes."""
    options = request.options
    return Rewriter(
        request.device,
        options.switches,
        strict=options.strict,
        verify=options.verify,
        providers=options.providers,
        batch_invariant=options.deterministic is not None,
    )


def make_stages(request: CompileRequest, account: Account, rewriter: Rewriter) -> Stages:
    """Return the shared state of the program's phases."""
    device, options = request.device, request.options
    buffers = StaticBuffers(request.inputs, request.table, device.torch_device, request.bound)
    return Stages(
        request=request,
        account=account,
        buffers=buffers,
        runner=GraphRunner(device, device.graph_backend(), debug=options.debug, strict=options.strict),
        tracer=Tracer(request, buffers),
        rewriter=rewriter,
        pieces=PieceLowering(device.lowerings.resolve(options.lowering)[1]),
        ahead=KernelsAhead(device, account.note),
        cache=open_cache(request, rewriter),
    )


def open_cache(request: CompileRequest, rewriter: Rewriter) -> ProgramCache | None:
    """Return the program's place in the compile cache; None where that is off or nothing would be traced."""
    traces = any(map(request.runs_trace, request.preferred.values()))
    if not request.options.cache or not Settings.from_environment().cache or not traces:
        return None
    if request.options.verify != "off":
        log.info("compile cache: not used, since passes are to be verified")
        return None
    return ProgramCache(request, rewriter.manager.passes)


class _Pipeline:
    """Captures every phase in its best mode, or in the next one if the model does not allow it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._request = stages.request
        self._options = stages.request.options

    def run(self) -> tuple[dict[str, Phase], dict[GraphKey, CapturedBucket]]:
        """Prepare and capture all phases; return the mode of each, and the captured buckets."""
        tell, candidates = on_first_rank(self._options.progress), self._request.candidates
        prepared: dict[str, _Prepared] = {}
        with self._stages.ahead.compiling():  # no capture may load a kernel
            for index, (name, modes) in enumerate(candidates.items()):
                if self._request.runs_trace(modes[0]):
                    tell(f"trace {name}", index, len(candidates))
                prepared[name] = self._prepare(name, modes)
        while True:
            order = capture_order({name: keys for name, (_, keys, _) in prepared.items()})
            captured: dict[GraphKey, CapturedBucket] = {}
            name = ""
            relocate(self._options, (phase for phase, _, _ in prepared.values()))
            try:
                with self._stages.runner.capture_session():
                    watched = {name: self._watched(name) for name, (_, keys, _) in prepared.items() if keys}
                    for index, key in enumerate(order):
                        name = key.phase
                        tell(f"capture {key}", len(captured), len(order))
                        for ahead in order[index : index + MAX_AT_ONCE]:
                            prepared[ahead.phase][0].begin(ahead)
                        try:
                            captured[key] = self._capture(key, prepared[name][0], watched[name])
                        except GraphResourcesError as error:
                            self._drop(order[len(captured) :], error)
                            break
                tell("capture", len(order), len(order))
                return {name: phase for name, (phase, _, _) in prepared.items()}, captured
            except CaptureError as error:
                if not name:
                    raise
                phase, _, untried = prepared[name]
                modes = self._modes_after(phase, untried, error)
            finally:
                for phase, _, _ in prepared.values():
                    phase.abandon()
            # Capture everything again: a backend can't drop single graphs, so their memory would stay in use.
            self._stages.runner.cleanup()
            self._stages.account.begin_captures()
            prepared[name] = self._prepare(name, modes)

    def _prepare(self, name: str, modes: tuple[Mode, ...]) -> _Prepared:
        """Prepare a phase in the first of these modes that it can run in, best first."""
        while True:
            mode, untried = modes[0], modes[1:]
            make = TracedPhase if self._request.runs_trace(mode) else UntracedPhase
            phase: Phase = make(name, mode, self._stages)
            try:
                return phase, phase.prepare(), untried
            except TraceError as error:
                modes = self._modes_after(phase, untried, error)

    def _modes_after(
        self, phase: Phase, untried: tuple[Mode, ...], error: TraceError | CaptureError
    ) -> tuple[Mode, ...]:
        """Return the untried modes to try after the phase's own mode failed, and note why.

        Raises the error if there is none, or if strict, unless no graph could compute what the trace states. A traced
        mode is followed by modes without a trace. A model that could be traced is run eagerly only after a capture
        without a trace failed too: before that the fault may be anything, a full memory or a bug.
        """
        was_traced = isinstance(error, CaptureError)
        traced_modes = TRACED_MODES if self._request.traced else ()
        dropped = (*traced_modes, "off") if was_traced and phase.mode in traced_modes else traced_modes
        stated = isinstance(error, TraceError) and error.states_recurrence
        if stated or (isinstance(error, TraceError) and error.keeps_state and self._options.eager is None):
            untried = tuple(mode for mode in untried if mode == "off")  # a capture without a trace would freeze it too
        modes = tuple(mode for mode in untried if mode not in dropped or (mode == "off" and "segmented" in untried))
        if not modes or (self._options.strict and not stated):
            raise error
        self._stages.tracer.forget(phase.name)
        what = "captured" if was_traced else "traced"
        self._stages.account.note(
            f"{phase.name} runs {modes[0]!r} instead of {phase.mode!r}: it can't be {what}: {reason_of(error)}"
        )
        return modes

    def _watched(self, name: str) -> Sequence[Watched]:
        return watch_modules(modules_of(self._request.models[name])) if self._options.debug else ()

    def _drop(self, keys: Sequence[GraphKey], error: GraphResourcesError) -> None:
        """Drop these buckets, since the device has no room for more graphs; raise the error if strict."""
        if self._options.strict:
            raise error
        reason = reason_of(error)
        self._stages.account.dropped.update(dict.fromkeys(keys, reason))
        self._stages.account.note(
            f"not captured: {', '.join(map(str, keys))}: {reason}; a larger captured bucket of the phase serves them, "
            "or none does and they run eagerly"
        )

    def _capture(self, key: GraphKey, phase: Phase, watched: Sequence[Watched]) -> CapturedBucket:
        """Bind, capture and check one bucket."""
        views = self._stages.buffers.views(key)
        runnable = phase.runnable(key)
        capture, reset = self._stages.runner.capture, self._options.reset
        outputs, report = phase.capture(key, partial(capture, key, runnable.run, views, reset=reset, watched=watched))
        self._stages.account.buckets.append(replace(report, lower_s=runnable.lower_s))
        phase.check(key, runnable)
        return CapturedBucket(
            key=key,
            inputs=views,
            output=runnable.output(),
            cropper=runnable.cropper,
            views_of_inputs=_views(outputs, views),
            values=runnable.values,
        )


def capture_order(keys: Mapping[str, Sequence[GraphKey]]) -> list[GraphKey]:
    """Return the keys of all phases in order of capture.

    The phase with the largest bucket comes first, and in each phase the largest bucket: later captures then fit into
    memory that the first one took. Before all others come the largest bucket of each phase under each of its guards,
    which can serve in place of smaller ones where the device does not hold that many graphs.
    """
    phases = sorted(keys, key=lambda phase: -max((_size(key) for key in keys[phase]), default=0))
    order = [key for phase in phases for key in sorted(keys[phase], key=lambda key: (-_size(key), key.dims))]
    first: dict[tuple[str, KeyGuards], GraphKey] = {}
    for key in order:
        first.setdefault((key.phase, key.guards), key)
    heads = set(first.values())
    return [*first.values(), *(key for key in order if key not in heads)]


def _size(key: GraphKey) -> int:
    return max(key.dims, default=1)


def _views(outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return which outputs lie in the memory of an input buffer, which every bucket writes at every call."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    return tuple(i for i, output in enumerate(outputs) if output.untyped_storage().data_ptr() in storages)
