"""The way from a request to a `Program`, readable top to bottom.

trace -> passes (and ATen, if one needs it) -> lower canonical ops -> lower the graph -> capture, largest bucket first
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from core.common.collector import paused
from core.common.graphs.backend import CallBackend
from core.compilation.account import Account, Teller, reason_of
from core.compilation.cache.program_cache import ProgramCache
from core.compilation.calls import CapturedBucket
from core.compilation.capture.breaks import modules_of
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.pieces import PieceLowering
from core.compilation.capture.runner import GraphRunner
from core.compilation.capture.watch import Watched, watch_modules
from core.compilation.compiles import counting_kernels
from core.compilation.phases.phase import Phase, Stages
from core.compilation.phases.traced import TracedPhase
from core.compilation.phases.tracer import Tracer
from core.compilation.phases.untraced import UntracedPhase
from core.compilation.program import Program
from core.compilation.report import BucketReport
from core.compilation.request import TRACED_MODES, CompileRequest
from core.compilation.rewrite.switches import PassSwitches
from core.compilation.rewriting import Rewriter
from core.errors import CaptureError, GraphResourcesError, TraceError
from core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import GraphKey, Guards
    from core.device import Mode

log = logging.getLogger("core.compilation.compile")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A phase that is ready to be captured, its keys, and the modes that are left where it can't be."""

    phase: Phase
    keys: tuple[GraphKey, ...]
    left: tuple[Mode, ...]


def make_program(request: CompileRequest) -> Program:
    """Trace, rewrite, lower and capture every phase that is not "off"."""
    account = Account()
    rewriter = rewriter_of(request)  # a misspelt pass is refused before anything runs
    # Tensors made in inference mode could never be written outside of it, and buffers are written at every call.
    with torch.inference_mode(False):
        if all(mode == "off" for mode in request.preferred.values()):
            runner = GraphRunner(request.device, CallBackend(), strict=request.options.strict)
            report = account.report(request, request.preferred)
            return Program(request, report, runner=runner)
        stages = make_stages(request, account, rewriter)
        try:
            # Traces make some hundred thousand objects and keep most: the collector would walk all of these, and the
            # whole process, again and again. A capture session begins with a collection.
            with paused(), counting_kernels() as account.kernels:
                phases, captured = _Pipeline(stages).run()
                if stages.cache is not None:
                    stages.cache.save()
        except BaseException:
            stages.runner.cleanup()
            raise
    modes = {name: phase.mode for name, phase in phases.items()}
    traces = [report for phase in phases.values() for report in phase.reports]
    report = account.report(request, modes, traces, static_bytes=stages.buffers.num_bytes, cache=stages.cache_report)
    return Program(request, report, runner=stages.runner, buffers=stages.buffers, captured=captured)


def rewriter_of(request: CompileRequest) -> Rewriter:
    """Return what runs the passes that a request asks for; raise `UsageError` for names that no pass has."""
    options = request.options
    return Rewriter(request.device, PassSwitches.of(options), strict=options.strict, verify=options.verify)


def make_stages(request: CompileRequest, account: Account, rewriter: Rewriter) -> Stages:
    """Return what the phases of the program share."""
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
    """Takes every phase from its best mode to graphs, and to the next mode where the model does not allow that one."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._request = stages.request
        self._options = stages.request.options

    def run(self) -> tuple[dict[str, Phase], dict[GraphKey, CapturedBucket]]:
        """Prepare and capture all phases; return what each runs as, and the captured buckets."""
        prepared = {name: self._prepare(name, modes) for name, modes in self._request.candidates.items()}
        while True:
            order = capture_order({name: each.keys for name, each in prepared.items()})
            teller = Teller(self._options.progress, len(order))
            captured: dict[GraphKey, CapturedBucket] = {}
            name = ""
            try:
                with self._stages.runner.capture_session():
                    watched = {name: self._watched(name) for name, each in prepared.items() if each.keys}
                    for key in order:
                        name = key.phase
                        teller.begin(key)
                        try:
                            captured[key] = self._capture(key, prepared[name].phase, watched[name])
                        except GraphResourcesError as error:
                            self._drop(order[len(captured) :], error)
                            break
                teller.end()
                return {name: each.phase for name, each in prepared.items()}, captured
            except CaptureError as error:
                if not name:
                    raise
                left = self._modes_after(prepared[name].phase, prepared[name].left, error)
            # All start anew: a backend can't drop single graphs, and the memory of those captured would stay taken.
            self._stages.runner.cleanup()
            self._stages.account.begin_captures()
            prepared[name] = self._prepare(name, left)

    def _prepare(self, name: str, modes: tuple[Mode, ...]) -> _Prepared:
        """Prepare a phase in the first of these modes that it can run in, best first."""
        while True:
            mode, left = modes[0], modes[1:]
            make = TracedPhase if self._request.runs_trace(mode) else UntracedPhase
            phase: Phase = make(name, mode, self._stages)
            try:
                return _Prepared(phase=phase, keys=phase.prepare(), left=left)
            except TraceError as error:
                modes = self._modes_after(phase, left, error)

    def _modes_after(self, phase: Phase, left: tuple[Mode, ...], error: TraceError | CaptureError) -> tuple[Mode, ...]:
        """Return those of the modes left that may do what the phase's own can't, and say why; raise the error where
        there is none, or strict.

        Traced modes give way to those without a trace. A model that could be traced is run eagerly only after a capture
        without a trace failed too: before that the fault may be anything, a full memory or a bug.
        """
        was_traced = isinstance(error, CaptureError)
        traced_modes = TRACED_MODES if self._request.traced else ()
        dropped = (*traced_modes, "off") if was_traced and phase.mode in traced_modes else traced_modes
        left = tuple(mode for mode in left if mode not in dropped or (mode == "off" and "segmented" in left))
        if not left or self._options.strict or (isinstance(error, TraceError) and error.spoiled):
            raise error
        self._stages.tracer.forget(phase.name)
        what = "captured" if was_traced else "traced"
        self._stages.account.note(
            f"{phase.name} runs {left[0]!r} instead of {phase.mode!r}: it can't be {what}: {reason_of(error)}"
        )
        return left

    def _watched(self, name: str) -> Sequence[Watched]:
        return watch_modules(modules_of(self._request.models[name])) if self._options.debug else ()

    def _drop(self, keys: Sequence[GraphKey], error: GraphResourcesError) -> None:
        """Leave these buckets out, as the device holds no more graphs; raise the error where strict."""
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
        bound = phase.bind(key)
        record = partial(self._stages.runner.capture, key, bound.run, views, reset=self._options.reset, watched=watched)
        outputs, cost = phase.capture(key, record)
        self._stages.account.buckets.append(
            BucketReport(
                key=key,
                lower_s=bound.lower_s,
                capture_s=cost.seconds,
                num_bytes=cost.num_bytes,
                num_graphs=cost.num_graphs,
                eager=cost.eager,
            )
        )
        phase.check(key, bound)
        return CapturedBucket(
            key=key,
            inputs=views,
            output=bound.output(),
            cropper=bound.cropper,
            views_of_inputs=_views(outputs, views),
            values=bound.values,
        )


def capture_order(keys: Mapping[str, Sequence[GraphKey]]) -> list[GraphKey]:
    """Return the keys of all phases in order of capture.

    The phase with the largest bucket first, and in each the largest first: later captures then fit into memory that the
    first one took. Before all others come the largest of each phase under each of its guards, which can serve in place
    of smaller ones where the device does not hold that many graphs.
    """
    phases = sorted(keys, key=lambda phase: -max((_size(key) for key in keys[phase]), default=0))
    order = [key for phase in phases for key in sorted(keys[phase], key=lambda key: (-_size(key), key.dims))]
    first: dict[tuple[str, Guards], GraphKey] = {}
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
