"""`Program`: a compiled model, all phases and buckets of it; what an engine calls at each step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core.compilation.calls import Calls, wrong_dtype
from core.compilation.capture.buffers import Staging, StaticBuffers, check_mirrors
from core.compilation.capture.host_arguments import step_of_call
from core.compilation.capture.plan import CapturedBucket, Plan
from core.compilation.capture.turns import Turns, copied
from core.compilation.eager import EagerRuns
from core.compilation.oversized import Eager, Split
from core.compilation.weights import NamedTensors, Weights
from core.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.capture.runner import GraphRunner
    from core.compilation.report import ProgramReport
    from core.compilation.request import CompileRequest

_PHASE = (str, type(None))
MAX_PLANS = 4096
"""Plans kept, one per combination of input shapes; beyond that all are dropped and made anew as they are needed."""


class Program:
    """A compiled model; made by `core.compile` and `core.capture`. Buckets share static buffers: one call at a time.

    A call while another one runs, in another thread or from inside of it, is a `UsageError`; with
    `CompileOptions(threads="serialize")` calls of other threads wait instead.

    Outputs are valid until the next call or replay of any bucket, by any thread; copy what must live longer. With
    "serialize" they are copies. Use as a context manager, or call `close()`, to return graph memory.
    """

    def __init__(
        self,
        request: CompileRequest,
        report: ProgramReport,
        *,
        runner: GraphRunner,
        weights: Weights,
        buffers: StaticBuffers | None = None,
        captured: Mapping[GraphKey, CapturedBucket] | None = None,
    ) -> None:
        """report: of the compile. buffers, captured: None where all phases run eagerly."""
        self.device = request.device
        self._turns = Turns(request.options.threads, request.device)
        self._calls = Calls(request, report.modes, captured or {}, report.dropped)
        self._eager = EagerRuns(request, self._calls, runner)
        self._updates = request.device.capabilities.update
        self._buffers = buffers
        self._runner = runner
        self.weights = weights
        self._report = report
        self._plans: dict[tuple[Any, ...], Plan | Split | Eager] = {}
        # A program with one phase needs no phase in its calls.
        self._only_phase = next(iter(request.table.phases)) if len(request.table.phases) == 1 else None
        self._bound = self._calls.bound
        self._closed = False

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """All captured keys."""
        return tuple(self._calls.captured)

    def report(self) -> ProgramReport:
        """Return what the compile did and cost, and what was replayed, run eagerly and compiled since."""
        report = self._report
        return replace(report, **self._runner.since(report.num_kernels, report.notes))

    def wait_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait until all buckets are compiled (`CompileOptions(background=True)`), or can't be, which the report notes;
        return whether that is so."""
        return self._runner.background.wait(timeout_s)

    def inputs(self, key: GraphKey) -> Mapping[str, Tensor]:
        """Return the static input buffers of a bucket, to be written before `replay`; they live as long as the program.

        Buckets of a phase share storage: writing one bucket's inputs overwrites another's. Write and replay in one
        thread: what is written is not seen by the check of calls. Raises `UsageError` where calls wait for each other.
        """
        if self._turns.waits:
            raise self._turns.refused_part()
        return self._bucket(key).inputs

    def bucket(
        self, phase: str, sizes: Mapping[str, int], guards: Mapping[str, Hashable] | None = None
    ) -> GraphKey | None:
        """Return the smallest captured key that holds these sizes of the bucket dimensions; None where none does.

        guards: the phase's guards by name. Raises `UsageError` for a phase or guard that the program does not have.
        """
        calls = self._calls
        key = calls.captured_table.find(self._phase(phase), sizes, calls.table.check_guards(phase, guards or {}))
        return key if key in calls.captured else None

    def stand_in(
        self, phase: str, sizes: Mapping[str, int], guards: Mapping[str, Hashable] | None = None
    ) -> GraphKey | None:
        """Return the dropped bucket that `bucket` replaces, or None; report such replays to `count_stand_in`."""
        calls = self._calls
        wanted = calls.table.find(self._phase(phase), sizes, calls.table.check_guards(phase, guards or {}))
        return wanted if wanted in calls.dropped else None

    def count_stand_in(self, wanted: GraphKey, used: GraphKey) -> None:
        """Count a replay of `used` in place of a dropped bucket."""
        self._runner.stand_ins[f"{used} in place of {wanted}"] += 1

    def staging(self, *, mirrors: int = 1) -> Staging:
        """Return host memory laid out like the static buffers, for engines that prepare inputs on the host.

        One copy moves all inputs of a step, where `program(**inputs)` makes one for each. Inputs are given at bucket
        size, padding included, and outputs come back uncut, as from `replay`. Ends with the program; pinned where the
        device copies while the host goes on.
        """
        check_mirrors(mirrors)
        if self._turns.waits:
            raise self._turns.refused_part()
        if self._buffers is None:
            found = "it was closed" if self._closed else "no phase of it is captured"
            raise CaptureError("staging inputs", found=found, remedy="compile with a mode other than 'off'")
        pinned = self.device.capabilities.asynchronous
        host = self._runner.host_arguments if self._updates else None
        return Staging(self._buffers, self._replay, self._turns, mirrors=mirrors, pinned=pinned, host_arguments=host)

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Return the names of the host-side arguments that a replay of a captured bucket is given as its step."""
        return self._runner.host_arguments(self._bucket(key).key)

    def source(self, key: GraphKey) -> str:
        """Return the generated Python that replays a key captured in parts; "" for a key that is one graph."""
        return self._runner.source(self._bucket(key).key)

    def replay(self, key: GraphKey, step: Mapping[str, Any] | None = None) -> Any:
        """Run a bucket on the present content of its buffers: nothing is copied in, nothing is sliced.

        Returns the model's output structure at the bucket's shapes, valid until the next replay of any key. An output
        that is a view of an input (a cast to its own dtype is one) is valid until any bucket's inputs are written. A
        key that was not captured is refused.

        step: host-side arguments by name, on a device whose graphs have them.
        """
        turns, before = self._turns, self._turns.begun
        if turns.busy_part():
            raise turns.refused_part()
        with turns.lock:  # `_replay` inlined: a further call would cost as much as the turn
            turns.begin(before)
            bucket = self._calls.captured.get(key) or self._bucket(key)
            return bucket.output.rebuild(self._runner.replay(key, step), bucket.inputs)

    def _replay(self, key: GraphKey, step: Mapping[str, Any] | None) -> Any:
        bucket = self._calls.captured.get(key) or self._bucket(key)
        return bucket.output.rebuild(self._runner.replay(key, step), bucket.inputs)

    def serving(self) -> AbstractContextManager[None]:
        """Enter around a run of calls: captures are refused in it, and compiles by torch counted (strict: an error)."""
        return self._runner.serving()

    def __call__(
        self,
        phase: str | Tensor | None = None,
        /,
        *values: Tensor,
        guards: Mapping[str, Hashable] | None = None,
        step: Mapping[str, Any] | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Run the model: copy inputs into the smallest bucket that fits, replay, slice the padding off.

        values, inputs: as declared, in that order or by name. phase: may be left out where the program has only one.
        guards: the phase's, by name. step: host-side arguments, as for `replay`; inputs that are given on the host need
        not be repeated in it.

        Where no captured graph may serve the call, the model runs eagerly, logged once per reason and counted in
        `report().fallbacks`; a strict program raises `CaptureError` instead. `CompileOptions(oversized=…)` says what
        happens with a call larger than the largest bucket. Raises `UsageError` for inputs that differ from their
        declaration, while another call runs, and where the model would run eagerly in training mode.
        """
        turns, before = self._turns, self._turns.begun
        if turns.busy():
            raise turns.refused()
        if values or phase.__class__ not in _PHASE:
            phase, inputs = self._calls.by_name(phase, values, inputs)
        with turns.lock:
            turns.begin(before)
            try:
                signature: tuple[Any, ...] = (phase, *[(name, tensor.shape) for name, tensor in inputs.items()])
                if guards:
                    signature += tuple((name, value, type(value)) for name, value in guards.items())  # 1 is not True
                plan = self._plans.get(signature)
            except (AttributeError, TypeError):
                raise self._calls.wrong(phase, inputs, guards) from None
            if plan is None:
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                plan = self._plans[signature] = self._calls.plan(self._phase(phase), guards or {}, inputs)
            if isinstance(plan, Plan):
                result = self._run(plan, inputs, step)
            elif isinstance(plan, Eager):
                result = self._eager.run(self._phase(phase), guards or {}, inputs, plan)
            else:
                plan.check_step(step)
                self._runner.oversized[plan.told] += 1
                result = plan.run(self._run, inputs)
            return copied(result, (*inputs.values(), *self._bound.values())) if turns.waits else result

    def _run(self, plan: Plan, inputs: Mapping[str, Tensor], step: Mapping[str, Any] | None = None) -> Any:
        if self._updates and step is None:
            step = self._host_step(plan.key, inputs)
        for name, buffer, dtype in plan.copies:
            tensor = inputs[name]
            if tensor.dtype is not dtype:
                raise wrong_dtype(name, tensor, dtype)
            buffer.copy_(tensor.detach() if tensor.requires_grad else tensor)
        for tail, value in plan.fills:
            tail.copy_(value) if isinstance(value, Tensor) else tail.fill_(value)
        if self._bound:
            self._calls.check_bound(plan.key, inputs)
        if plan.wanted is not None:
            self.count_stand_in(plan.wanted, plan.key)
        outputs: Any = self._runner.replay(plan.key, step)
        if plan.crops or plan.cloned:
            outputs = list(outputs)
            for index, crop in plan.crops:
                outputs[index] = outputs[index][crop]
            for index in plan.cloned:
                outputs[index] = outputs[index].clone()
        if plan.single >= 0:
            return outputs[plan.single]
        return plan.output.rebuild(outputs, {**self._bound, **inputs} if self._bound else inputs)

    def load_weights(self, weights: NamedTensors, *, partial: bool = False) -> None:
        """Copy new values over the model's weights, in place: captured graphs hold these addresses (docs/capture.md).

        weights: by the names of the model's `state_dict`, on any device. A mapping or sequence is checked whole before
        anything is written, an iterator tensor by tensor: where a later one is wrong, calls are refused until all have
        been loaded. partial: whether parameters may be missing; buffers and further names of a tied weight always may.

        Raises `UsageError` for missing or unknown names, other shapes or dtypes, and new values of a weight from which
        passes have made something.
        """
        with self._turns.anyway():
            if self._closed:
                raise CaptureError("loading weights", found="the program was closed", remedy="compile it again")
            try:
                self.weights.load(weights, partial=partial)
                self.device.synchronize()  # the caller may free the given tensors now
            finally:
                self._turns.hold(self.weights.mixed)

    def close(self) -> None:
        """Drop all captured graphs and return their memory; the program can't be called afterwards.

        Raises `UsageError` while a call runs, or waits for it, as a call does.
        """
        with self._turns.anyway():
            self._runner.cleanup()
            self._calls.close()
            self._plans.clear()
            self._eager.close()
            self._buffers = None
            self._closed = True
            self.device.parts.empty_cache()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _phase(self, phase: str | None) -> str:
        if self._closed:
            raise CaptureError("calling a program", found="it was closed", remedy="compile it again")
        if phase is not None and not isinstance(phase, str):
            raise self._calls.wrong(phase, {})
        phase = phase if phase is not None else self._only_phase
        if phase is None or phase not in self._calls.table.phases:
            found = f"the program has: {', '.join(self._calls.table.phases)}"
            raise UsageError(f"phase {phase!r}", found=found, remedy="pass one of these as the first argument")
        return phase

    def _host_step(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Mapping[str, Any] | None:
        names, sizes = self._runner.host_arguments(key), self._calls.table.sizes(key)
        return step_of_call(key, names, inputs, specs=self._calls.inputs, sizes=sizes) if names else None

    def _bucket(self, key: GraphKey) -> CapturedBucket:
        if self._closed:
            raise CaptureError(f"replaying {key}", found="it was closed", remedy="compile it again")
        if key not in self._calls.captured:
            raise self._runner.not_captured(key)
        return self._calls.captured[key]
