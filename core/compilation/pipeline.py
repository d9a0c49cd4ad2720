"""The way from a model to a `Program`, readable top to bottom.

trace -> passes (and ATen, if one needs it) -> lower canonical ops -> lower the graph -> capture, largest bucket first
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.common.collector import paused
from core.common.graphs.backend import CallBackend, GraphKey
from core.compilation.arguments import (
    Examples,
    check_bound,
    check_callable,
    check_ops,
    check_outputs,
    check_phases,
    check_placement,
    check_signature,
    check_training_mode,
    examples_per_phase,
    models_per_phase,
)
from core.compilation.cache.program_cache import ProgramCache
from core.compilation.cache.program_factors import Subject
from core.compilation.capture.breaks import modules_of
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.order import capture_order
from core.compilation.capture.runner import CaptureCost, GraphRunner
from core.compilation.capture.untraced import OutputDims
from core.compilation.capture.watch import Watched, watch_modules
from core.compilation.compiles import KernelCount, counting_kernels
from core.compilation.options import CompileOptions
from core.compilation.phases.traced import TracedPhases
from core.compilation.phases.untraced import UntracedPhases
from core.compilation.program import CapturedBucket, Program
from core.compilation.report import BucketReport, CacheReport, ProgramReport
from core.compilation.rewrite.switches import PassSwitches
from core.compilation.rewriting import Rewriter
from core.compilation.shared_trace import SharedTrace
from core.device import Device, Mode
from core.errors import CaptureError, GraphResourcesError, TraceError, one_line
from core.settings import Settings

log = logging.getLogger("core.compilation.compile")
Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)` while buckets are captured; on the first rank only."""
Models = Callable[..., Any] | Mapping[str, Callable[..., Any]]
TRACED: tuple[Mode, ...] = ("full", "piecewise", "compile")


@dataclass(slots=True)
class _Account:
    """What a compile has done so far."""

    start: float = field(default_factory=time.perf_counter)
    modes: dict[str, Mode] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    buckets: list[BucketReport] = field(default_factory=list)
    dropped: dict[GraphKey, str] = field(default_factory=dict)
    kernels: KernelCount = field(default_factory=KernelCount)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stages:
    """What a compile works with once its arguments are checked. cache: None where it is off."""

    buffers: StaticBuffers
    runner: GraphRunner
    traced: TracedPhases
    untraced: UntracedPhases
    cache: ProgramCache | None


class _Teller:
    """Tells the caller how many captures are done, on the first rank only."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress if _is_first_rank() else None
        self._total, self._done = total, 0

    def begin(self, key: GraphKey) -> None:
        if self._progress is not None:
            self._progress(f"capture {key}", self._done, self._total)
        self._done += 1

    def end(self) -> None:
        if self._progress is not None:
            self._progress("capture", self._total, self._total)


class Pipeline:
    """One way from models to a `Program`; holds what its stages share."""

    def __init__(
        self,
        model: Models,
        device: Device,
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        options: CompileOptions,
        *,
        bound: Mapping[str, Tensor] | None,
        reset: Callable[[], None] | None,
        traced: bool = True,
        outputs: Sequence[OutputDims] | None = None,
        shared: SharedTrace | None = None,
        cache: bool = False,
    ) -> None:
        self.device = device
        self.inputs = inputs
        self.table = table
        self.options = options
        self.models = models_per_phase(model, table)
        for phase, each in self.models.items():
            check_signature(each, inputs, table.guards[phase])
            check_training_mode(each)
            check_placement(each, device)
        check_phases(options.mode, table)
        self.bound = check_bound(bound, inputs)
        check_outputs(outputs, table.dims)
        check_callable("reset", reset)
        self.candidates = {phase: options.modes_of(phase, device.capabilities.modes) for phase in table.phases}
        device.lowerings.resolve(options.lowering)
        check_ops(device)
        self.rewriter = Rewriter(
            device,
            PassSwitches(only=options.passes, disable=options.disable_passes, enable=options.enable_passes),
            strict=options.strict,
            verify=options.verify,
        )
        self.reset = reset
        self.traced_modes = TRACED if traced else ()
        self.outputs = outputs
        if shared is not None:
            shared.check(table.phases)
        self.shared = shared
        self.cache_wanted = cache
        self.account = _Account()

    def run(self, examples: Examples | Sequence[Mapping[str, Tensor]] | None, progress: Progress | None) -> Program:
        """Trace, rewrite, lower and capture every phase that is not "off"."""
        check_callable("progress", progress)
        preferred = {phase: modes[0] for phase, modes in self.candidates.items()}
        given = examples_per_phase(examples, self.inputs, preferred, self.options.verify)
        captured: dict[GraphKey, CapturedBucket] = {}
        # Tensors made in inference mode could never be written outside of it, and buffers are written at every call.
        with torch.inference_mode(False):
            if all(mode == "off" for mode in preferred.values()):
                self.account.modes = preferred
                runner, buffers = GraphRunner(self.device, CallBackend(), strict=self.options.strict), None
            else:
                self.stages = self._stages(given)
                runner, buffers = self.stages.runner, self.stages.buffers
                try:
                    # Traces make some hundred thousand objects and keep most: the collector would walk all of these,
                    # and the whole process, again and again. A capture session begins with a collection.
                    with paused(), counting_kernels() as self.account.kernels:
                        captured = self._capture_all(progress)
                        if self.stages.cache is not None:
                            self.stages.cache.save()
                except BaseException:
                    runner.cleanup()
                    raise
        if self.options.eager and "segmented" not in self.account.modes.values():
            self._note(f"eager={self.options.eager!r} is not used: no phase runs 'segmented'")
        return Program(
            device=self.device,
            models=self.models,
            modes=self.account.modes,
            inputs=self.inputs,
            table=self.table,
            buffers=buffers,
            runner=runner,
            captured=captured,
            report=self._report(buffers),
            strict=self.options.strict,
            bound=self.bound,
            dropped=self.account.dropped,
        )

    def _stages(self, examples: Examples) -> _Stages:
        buffers = StaticBuffers(self.inputs, self.table, self.device.torch_device, self.bound)
        runner = GraphRunner(
            self.device, self.device.graph_backend(), debug=self.options.debug, strict=self.options.strict
        )
        common: dict[str, Any] = {
            "inputs": self.inputs,
            "table": self.table,
            "buffers": buffers,
            "examples": examples,
        }
        cache = self.open_cache()
        traced = TracedPhases(
            self.device, self.options, rewriter=self.rewriter, shared=self.shared, cache=cache, **common
        )
        return _Stages(
            buffers=buffers,
            runner=runner,
            cache=cache,
            traced=traced,
            untraced=UntracedPhases(self.options, runner=runner, outputs=self.outputs, reset=self.reset, **common),
        )

    def open_cache(self) -> ProgramCache | None:
        """Return the program's place in the compile cache; None where that is off or nothing would be traced."""
        first = {modes[0] for modes in self.candidates.values()}
        if not self.cache_wanted or not Settings.from_environment().cache or not first & set(self.traced_modes):
            return None
        if self.options.verify != "off":
            log.info("compile cache: not used, since passes are to be verified")
            return None
        subject = Subject(
            models=self.models,
            device=self.device,
            inputs=self.inputs,
            bound=self.bound,
            table=self.table,
            options=self.options,
            rewriter=self.rewriter,
            shared=self.shared,
        )
        return ProgramCache(subject)

    def _prepare(self, phase: str, left: list[Mode]) -> tuple[GraphKey, ...]:
        """Settle the mode of a phase, tracing it where that needs a trace, and return the keys to capture.

        left: the modes that may serve it, best first; those tried are taken off.
        """
        while True:
            mode = left.pop(0)
            self.account.modes[phase] = mode
            if mode not in self.traced_modes:
                return self.table.phases[phase] if mode != "off" else ()
            try:
                num_breaks = self.stages.traced.trace(phase, self.models[phase], mode)
            except TraceError as error:
                self._downgrade(phase, left, error)
                continue
            if mode == "piecewise" and not num_breaks:
                self._note(f"{phase} is one graph: no op in it is a break point of 'piecewise'")
            return self.table.phases[phase]

    def _downgrade(self, phase: str, left: list[Mode], error: TraceError | CaptureError) -> None:
        """Leave in `left` the modes that may do what the present one can't, and say why; raise the error where there is
        none, or strict.

        Traced modes give way to those without a trace. A model that could be traced is run eagerly only after a capture
        without a trace failed too: before that the fault may be anything, a full memory or a bug.
        """
        mode, traced = self.account.modes[phase], isinstance(error, CaptureError)
        dropped = (*self.traced_modes, "off") if traced and mode in self.traced_modes else self.traced_modes
        left[:] = [other for other in left if other not in dropped or (other == "off" and "segmented" in left)]
        if not left or self.options.strict or (isinstance(error, TraceError) and error.spoiled):
            raise error
        self.stages.traced.forget(phase)
        what = "captured" if traced else "traced"
        self._note(f"{phase} runs {left[0]!r} instead of {mode!r}: it can't be {what}: {_reason(error)}")

    def _note(self, note: str) -> None:
        log.warning(note)
        self.account.notes.append(note)

    def _capture_all(self, progress: Progress | None) -> dict[GraphKey, CapturedBucket]:
        """Capture every phase, the one with the largest bucket first."""
        left = {phase: list(modes) for phase, modes in self.candidates.items()}
        keys = {phase: self._prepare(phase, left[phase]) for phase in self.table.phases}
        while True:
            tell = _Teller(progress, sum(map(len, keys.values())))
            captured: dict[GraphKey, CapturedBucket] = {}
            phase = ""
            try:
                with self.stages.runner.capture_session():
                    watched = {phase: self._watched(phase) for phase, each in keys.items() if each}
                    order = capture_order(keys)
                    for key in order:
                        phase = key.phase
                        tell.begin(key)
                        try:
                            captured[key] = self._capture(key, watched[phase])
                        except GraphResourcesError as error:
                            self._drop([other for other in order if other not in captured], error)
                            break
                tell.end()
                return captured
            except CaptureError as error:
                if not phase:
                    raise
                self._downgrade(phase, left[phase], error)
            # All start anew: a backend can't drop single graphs, and the memory of those captured would stay taken.
            self.stages.runner.cleanup()
            self.account.buckets.clear()
            self.account.dropped.clear()
            keys[phase] = self._prepare(phase, left[phase])

    def _watched(self, phase: str) -> Sequence[Watched]:
        return watch_modules(modules_of(self.models[phase])) if self.options.debug else ()

    def _drop(self, keys: Sequence[GraphKey], error: GraphResourcesError) -> None:
        """Leave these buckets out, as the device holds no more graphs; raise the error where strict."""
        if self.options.strict:
            raise error
        self.account.dropped.update(dict.fromkeys(keys, reason := _reason(error)))
        names = ", ".join(map(str, keys))
        self._note(
            f"not captured: {names}: {reason}; a larger captured bucket of the phase serves them, or none does "
            "and they run eagerly"
        )

    def _capture(self, key: GraphKey, watched: Sequence[Watched]) -> CapturedBucket:
        model, mode, views = self.models[key.phase], self.account.modes[key.phase], self.stages.buffers.views(key)
        traced = self.stages.traced if mode in self.traced_modes else None
        bound = traced.bind(key) if traced is not None else self.stages.untraced.bind(key, model)
        in_parts = traced.in_parts(key) if traced is not None else mode == "segmented"

        def capture() -> tuple[tuple[Tensor, ...], CaptureCost]:
            return self.stages.runner.capture(
                key, bound.run, views, in_parts=in_parts, reset=self.reset, watched=watched
            )

        if traced is not None:
            with traced.blaming(key):
                outputs, cost = capture()
        else:
            outputs, cost = self.stages.untraced.capture(key, model, capture)
        self.account.buckets.append(
            BucketReport(
                key=key,
                lower_s=bound.lower_s,
                capture_s=cost.seconds,
                num_bytes=cost.num_bytes,
                num_graphs=cost.num_graphs,
                eager=cost.eager,
            )
        )
        if traced is None:
            self.stages.untraced.check(key, bound)
        return CapturedBucket(
            key=key,
            inputs=views,
            output=bound.output(),
            cropper=bound.cropper,
            views_of_inputs=_views(outputs, views),
            values=bound.values,
        )

    def _report(self, buffers: StaticBuffers | None) -> ProgramReport:
        account = self.account
        stages = self.stages if buffers is not None else None
        any_traced = any(mode in self.traced_modes for mode in account.modes.values())
        lowerings, wanted = self.device.lowerings, self.options.lowering
        lowering = lowerings.resolve(wanted)[0] if any_traced or self.traced_modes else "none"
        unasked = lowerings.notes(wanted) if any_traced else ()
        return ProgramReport(
            device=self.device.name,
            plugin=str(self.device.plugin),
            modes={phase: account.modes[phase] for phase in self.table.phases},
            lowering=lowering,
            traces=tuple(stages.traced.reports) if stages is not None else (),
            buckets=tuple(account.buckets),
            static_bytes=buffers.num_bytes if buffers is not None else 0,
            total_s=time.perf_counter() - account.start,
            num_kernels=account.kernels.total,
            cache=stages.cache.report if stages is not None and stages.cache is not None else CacheReport(),
            dropped=dict(account.dropped),
            notes=(*unasked, *account.notes, *(stages.untraced.notes if stages is not None else ())),
        )


def _reason(error: TraceError | CaptureError) -> str:
    """Return in one line why a model could not be traced or captured, and at which place of its code."""
    text = " ".join(error.found.split())
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    why = re.split(r"\s(?:(?:Hint|Developer debug context):\s|The branch condition involves)", error.found)[0]
    why = one_line(re.sub(r"\s+Explanation:", ":", why))
    return f"{why} ({places[-1][0].rsplit('/')[-1]}:{places[-1][1]})" if places else why


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _views(outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return which outputs lie in the memory of an input buffer, which every bucket writes at every call."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    return tuple(i for i, output in enumerate(outputs) if output.untyped_storage().data_ptr() in storages)
