"""`Program`: a compiled model, all phases and buckets of it; what an engine calls at each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey, Guards
from core.compilation.capture.buffers import Staging, StaticBuffers, check_mirrors
from core.compilation.capture.host_arguments import step_of_call
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.plan import Cropper, Plan, make_plan
from core.compilation.capture.runner import GraphRunner
from core.compilation.report import ProgramReport
from core.compilation.trace.traced import OutputTree
from core.device import Device, Mode
from core.errors import CaptureError, CoreError, UsageError

log = logging.getLogger("core.compilation.program")


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedBucket:
    """One key's static input views, how to rebuild the model's output, and how to cut padding off it.

    values: everything that the captured graph reads; kept, because a graph of the device holds addresses only.
    """

    key: GraphKey
    inputs: Mapping[str, Tensor]
    output: OutputTree
    cropper: Cropper
    views_of_inputs: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()


FEWER_GRAPHS = "declare fewer buckets, or free other programs of the process; every graph takes streams of the device"
MAX_PLANS = 4096
"""Plans kept, one per combination of input shapes; beyond that all are dropped and made anew as they are needed."""


class Program:
    """A compiled model; made by `core.compile` and `core.capture`. Not thread-safe: buckets share static buffers.

    Outputs are valid until the next call or replay of any bucket; copy what must live longer. Use as a context manager,
    or call `close()`, to return graph memory.
    """

    def __init__(
        self,
        *,
        device: Device,
        models: Mapping[str, Callable[..., Any]],
        modes: Mapping[str, Mode],
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        buffers: StaticBuffers | None,
        runner: GraphRunner,
        captured: Mapping[GraphKey, CapturedBucket],
        report: ProgramReport,
        strict: bool = False,
        bound: Mapping[str, Tensor] | None = None,
        dropped: Mapping[GraphKey, str] | None = None,
    ) -> None:
        """dropped: buckets that could not be captured while others were, each with the reason; larger ones serve."""
        self.device = device
        self._models = dict(models)
        self._modes = dict(modes)
        self._inputs = dict(inputs)
        self._table = table
        self._dropped = dict(dropped or {})
        self._captured_table = table.without(self._dropped)
        self._updates = device.capabilities.update
        self._buffers = buffers
        self._runner = runner
        self._captured = dict(captured)
        self._report = report
        self._strict = strict
        self._plans: dict[tuple[Any, ...], Plan | str] = {}
        # A program with one phase needs no phase in its calls.
        self._only_phase = next(iter(table.phases)) if len(table.phases) == 1 else None
        self._bound = dict(bound or {})
        self._closed = False

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """All captured keys."""
        return tuple(self._captured)

    def report(self) -> ProgramReport:
        """Return what the compile did and cost, and what was replayed, run eagerly and compiled since."""
        return replace(
            self._report,
            replays=self._runner.replays(),
            fallbacks=dict(self._runner.fallbacks),
            stand_ins=dict(self._runner.stand_ins),
            compiles=dict(self._runner.compiles.counts),
        )

    def inputs(self, key: GraphKey) -> Mapping[str, Tensor]:
        """Return the static input buffers of a bucket, to be written before `replay`; they live as long as the program.

        Buckets of a phase share storage: writing one bucket's inputs overwrites another's.
        """
        return self._bucket(key).inputs

    def bucket(
        self, phase: str, sizes: Mapping[str, int], guards: Mapping[str, Hashable] | None = None
    ) -> GraphKey | None:
        """Return the smallest captured key that holds these sizes of the bucket dimensions; None where none does.

        guards: the phase's guards by name. Raises `UsageError` for a phase or guard that the program does not have.
        """
        key = self._captured_table.find(self._phase(phase), sizes, self._table.check_guards(phase, guards or {}))
        return key if key in self._captured else None

    def stand_in(
        self, phase: str, sizes: Mapping[str, int], guards: Mapping[str, Hashable] | None = None
    ) -> GraphKey | None:
        """Return the dropped bucket in whose place `bucket` gives another; its replays go to `count_stand_in`."""
        wanted = self._table.find(self._phase(phase), sizes, self._table.check_guards(phase, guards or {}))
        return wanted if wanted in self._dropped else None

    def count_stand_in(self, wanted: GraphKey, used: GraphKey) -> None:
        """Count a replay of `used` in place of a dropped bucket."""
        self._runner.stand_ins[f"{used} in place of {wanted}"] += 1

    def staging(self, *, mirrors: int = 1) -> Staging:
        """Return host memory laid out like the static buffers, for engines that prepare inputs on the host.

        One copy moves all inputs of a step to the device, where `program(**inputs)` makes one for each. Inputs are
        given at bucket size, padding included, and outputs come back uncut, as from `replay`. Belongs to the program
        and ends with it; pinned where the device copies while the host goes on.
        """
        check_mirrors(mirrors)
        if self._closed or self._buffers is None:
            found = "it was closed" if self._closed else "no phase of it is captured"
            raise CaptureError("staging inputs", found=found, remedy="compile with a mode other than 'off'")
        pinned = self.device.capabilities.asynchronous
        host = self._runner.host_arguments if self._updates else None
        return Staging(self._buffers, self.replay, mirrors=mirrors, pinned=pinned, host_arguments=host)

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Return the names of the host-side arguments that a replay of a captured bucket is given as its step."""
        return self._runner.host_arguments(self._bucket(key).key)

    def source(self, key: GraphKey) -> str:
        """Return the generated Python that replays a key captured in parts; "" for a key that is one graph."""
        return self._runner.source(self._bucket(key).key)

    def replay(self, key: GraphKey, step: Mapping[str, Any] | None = None) -> Any:
        """Run a bucket on the present content of its buffers: nothing is copied in, nothing is sliced.

        step: host-side arguments by name, on a device whose graphs have them. Returns the model's output structure at
        the bucket's shapes, valid until the next replay of any key; an output that is a view of an input (a cast to its
        own dtype is one) until any bucket's inputs are written. A key that was not captured is refused.
        """
        bucket = self._captured.get(key) or self._bucket(key)
        outputs = self._runner.replay(key, step)
        return bucket.output.rebuild(outputs, bucket.inputs)

    def serving(self) -> AbstractContextManager[None]:
        """Enter around a run of calls: captures are refused in it, and compiles by torch counted (strict: an error)."""
        return self._runner.serving()

    def __call__(
        self,
        phase: str | None = None,
        /,
        *,
        guards: Mapping[str, Hashable] | None = None,
        step: Mapping[str, Any] | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Run the model on `inputs`: copy them into the smallest bucket that fits, replay, slice the padding off.

        phase may be left out where the program has one only. guards: the phase's guards by name. step: host-side
        arguments, as for `replay`; those that are inputs given on the host need not be repeated in it. Padding is right
        where the model treats the entries of a bucket dimension independently or masks them itself; declaring the
        dimension states that.

        Where no captured graph may serve the call, the model runs eagerly, which is logged once per reason and counted
        in `report().fallbacks`; a strict program raises `CaptureError` instead. Raises `UsageError` for inputs that
        differ from their declaration.
        """
        try:
            signature: tuple[Any, ...] = (phase, *[(name, tensor.shape) for name, tensor in inputs.items()])
            if guards:
                signature += tuple((name, value, type(value)) for name, value in guards.items())  # 1 is no True
            plan = self._plans.get(signature)
        except (AttributeError, TypeError):
            raise self._wrong_call(phase, inputs, guards) from None
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[signature] = self._plan(self._phase(phase), guards or {}, inputs)
        if isinstance(plan, str):
            return self._run_eager(self._phase(phase), guards or {}, inputs, plan)
        if self._updates and step is None:
            step = self._host_step(plan.key, inputs)
        for name, buffer, dtype in plan.copies:
            tensor = inputs[name]
            if tensor.dtype is not dtype:
                raise self._wrong_dtype(name, tensor, dtype)
            buffer.copy_(tensor.detach() if tensor.requires_grad else tensor)
        for tail, value in plan.fills:
            tail.copy_(value) if isinstance(value, Tensor) else tail.fill_(value)
        if self._bound:
            self._check_bound(plan.key, inputs)
        if plan.wanted is not None:
            self.count_stand_in(plan.wanted, plan.key)
        outputs: Any = self._runner.replay(plan.key, step)
        if plan.crops or plan.views_of_inputs:
            outputs = list(outputs)
            for index in plan.views_of_inputs:
                outputs[index] = outputs[index].clone()
            for index, crop in plan.crops:
                outputs[index] = outputs[index][crop]
        if plan.single >= 0:
            return outputs[plan.single]
        return plan.output.rebuild(outputs, {**self._bound, **inputs} if self._bound else inputs)

    def close(self) -> None:
        """Drop all captured graphs and return their memory; the program can't be called afterwards."""
        self._runner.cleanup()
        self._captured.clear()
        self._plans.clear()
        self._models = {}
        self._buffers = None
        self._bound = {}
        self._closed = True
        self.device.parts.empty_cache()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _phase(self, phase: str | None) -> str:
        if self._closed:
            raise CaptureError("calling a program", found="it was closed", remedy="compile it again")
        if phase is not None and not isinstance(phase, str):
            raise self._wrong_call(phase, {})
        phase = phase if phase is not None else self._only_phase
        if phase is None or phase not in self._table.phases:
            raise UsageError(
                f"phase {phase!r}",
                found=f"the program has: {', '.join(self._table.phases)}",
                remedy="pass one of these as the first argument",
            )
        return phase

    def _host_step(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Mapping[str, Any] | None:
        names, sizes = self._runner.host_arguments(key), self._table.sizes(key)
        return step_of_call(key, names, inputs, specs=self._inputs, sizes=sizes) if names else None

    def _check_names(self, inputs: Mapping[str, Tensor]) -> None:
        if not self._inputs.keys() - self._bound.keys() <= inputs.keys() <= self._inputs.keys():
            raise UsageError(
                f"inputs {sorted(inputs)}",
                found=f"the program declares {sorted(self._inputs)}",
                remedy="pass exactly the declared inputs, by name",
            )

    def _check_bound(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> None:
        """Refuse another tensor in place of one whose memory the graphs read; a bound input need not be given."""
        for name in self._bound.keys() & inputs.keys():
            bound = self._bound[name]
            if inputs[name].data_ptr() != bound.data_ptr():
                raise CaptureError(
                    f"input {name!r} at {inputs[name].data_ptr():#x}",
                    found=f"it is bound: {key} reads the tensor at {bound.data_ptr():#x} that was given at compile",
                    remedy="write into that tensor in place, or leave the input out of the call",
                )

    def _run_eager(self, phase: str, guards: Mapping[str, Hashable], inputs: Mapping[str, Tensor], reason: str) -> Any:
        """Run the model as it is. reason: why, where that is not what the phase's mode says."""
        sizes = self._measure(inputs)
        for name, tensor in inputs.items():
            if tensor.dtype is not self._inputs[name].dtype:
                raise self._wrong_dtype(name, tensor, self._inputs[name].dtype)
        if reason:
            if reason not in self._runner.fallbacks:
                log.warning("%s runs eagerly with %s: %s", phase, sizes, reason)
            self._runner.fallbacks[reason] += 1
        with torch.no_grad():
            # A captured call copies inputs into buffers, wherever these lie; `to` gives those in place themselves.
            own = {name: tensor.to(self.device.torch_device) for name, tensor in inputs.items()}
            result = self._models[phase](**{**self._bound, **own}, **guards)
        self._runner.compiles.raise_pending()
        return result

    def _measure(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        self._check_names(inputs)
        sizes: dict[str, int] = {}
        for name, tensor in inputs.items():
            self._inputs[name].measure(name, tensor.shape, sizes)
        return sizes

    def _plan(self, phase: str, guards: Mapping[str, Hashable], inputs: Mapping[str, Tensor]) -> Plan | str:
        """Return the plan of a call; "" where the phase's mode is "off"; the reason where there is no graph for it."""
        sizes = self._measure(inputs)
        values = self._table.check_guards(phase, guards)
        if self._modes[phase] == "off":
            return ""
        try:
            return self._captured_plan(phase, values, sizes, inputs)
        except CaptureError as error:
            if self._strict:
                raise
            return f"{phase}: {error.found}"  # what was asked holds the sizes, of which there may be many

    def _captured_plan(
        self, phase: str, guards: Guards, sizes: Mapping[str, int], inputs: Mapping[str, Tensor]
    ) -> Plan:
        wanted = self._table.find(phase, sizes, guards)
        key = self._captured_table.find(phase, sizes, guards)
        if key is None:
            asked = f"running phase {phase!r} with " + ", ".join(f"{k} = {v}" for k, v in (*sizes.items(), *guards))
            if wanted is not None:
                raise CaptureError(
                    asked, found=f"its buckets could not be captured: {self._dropped[wanted]}", remedy=FEWER_GRAPHS
                )
            alike = [known for known in self._table.phases[phase] if known.guards == guards]
            if not alike:
                given = ", ".join(f"{name} = {value}" for name, value in guards)
                raise CaptureError(
                    asked,
                    found=f"not captured with {given}; captured are: {', '.join(map(str, self._captured))}",
                    remedy="compile with this value too: guards={name: (value, …)}",
                )
            raise CaptureError(
                asked,
                found=f"no bucket is that large; the largest is {alike[-1]}",
                remedy="compile with a larger bucket, or split the batch",
            )
        bucket = self._bucket(key)
        return make_plan(
            key,
            {**self._bound, **inputs},
            specs=self._inputs,
            buffers=bucket.inputs,
            output=bucket.output,
            cropper=bucket.cropper,
            views_of_inputs=bucket.views_of_inputs,
            wanted=wanted if wanted != key else None,
        )

    def _bucket(self, key: GraphKey) -> CapturedBucket:
        if self._closed:
            raise CaptureError(f"replaying {key}", found="it was closed", remedy="compile it again")
        if key not in self._captured:
            raise self._runner.not_captured(key)
        return self._captured[key]

    def _wrong_call(self, phase: object, inputs: Mapping[str, Any], guards: object = None) -> CoreError:
        """Return the error for arguments that are no tensors by name."""
        if phase is not None and not isinstance(phase, str):
            return UsageError(
                f"calling a program with a {type(phase).__name__} in first place",
                found="the first argument names the phase; inputs go by name",
                remedy=f"call it like program({', '.join(f'{name}=…' for name in self._inputs)})",
            )
        self._check_names(inputs)
        wrong = [(n, v) for n, v in inputs.items() if not isinstance(v, Tensor)]
        if not wrong and not isinstance(guards, Mapping):
            return UsageError(
                f"calling a program with guards={guards!r}",
                found=f"a {type(guards).__name__}",
                remedy="give a mapping: guards={name: value}",
            )
        if not wrong:
            return UsageError(
                "calling a program with guards", found="a value that can't be hashed", remedy="pass plain values"
            )
        return self._wrong_dtype(*wrong[0], self._inputs[wrong[0][0]].dtype)

    @staticmethod
    def _wrong_dtype(name: str, found: object, wanted: torch.dtype) -> UsageError:
        if not isinstance(found, Tensor):
            return UsageError(
                f"input {name!r}", found=f"a {type(found).__name__}", remedy=f"pass a torch tensor of {wanted}"
            )
        return UsageError(
            f"input {name!r} of {found.dtype}",
            found=f"the program declares {wanted}",
            remedy="convert it first; a silent cast could change results",
        )
