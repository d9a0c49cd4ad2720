"""`Program`: a compiled model, all phases and buckets of it; what an engine calls at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.common.graphs.backend import GraphBackend, GraphKey
from core.common.graphs.inputs import BucketTable, InputSpec, StaticBuffers
from core.common.report import ProgramReport
from core.common.traced import OutputTree, TracedGraph
from core.device import Device
from core.errors import CaptureError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedBucket:
    """One key's static input views, the trace it came from, and how to rebuild the model's output.

    values: everything that the captured graph reads; kept, because a graph of the device holds addresses only.
    """

    key: GraphKey
    inputs: Mapping[str, Tensor]
    traced: TracedGraph
    output: OutputTree
    views_of_inputs: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()


MAX_PLANS = 4096
"""Plans kept, one per combination of input shapes; beyond that all are dropped and made anew as they are needed."""


class _Plan(NamedTuple):
    """All decisions about a call with inputs of given shapes, made once."""

    key: GraphKey
    copies: tuple[tuple[str, Tensor, torch.dtype], ...]
    fills: tuple[tuple[Tensor, int | float | Tensor], ...]
    crops: tuple[tuple[int, tuple[slice, ...]], ...]
    views_of_inputs: tuple[int, ...]
    output: OutputTree
    single: int


class Program:
    """A compiled model; made by `core.compile`. Not thread-safe: buckets share their static buffers.

    Outputs are valid until the next call or replay of the same bucket; copy what must live longer. Use as a context
    manager, or call `close()`, to return graph memory.
    """

    def __init__(
        self,
        *,
        device: Device,
        eager: Mapping[str, Callable[..., Any]],
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        buffers: StaticBuffers | None,
        backend: GraphBackend,
        captured: Mapping[GraphKey, CapturedBucket],
        report: ProgramReport,
    ) -> None:
        self.device = device
        self._eager = eager
        self._inputs = dict(inputs)
        self._table = table
        self._buffers = buffers
        self._backend = backend
        self._captured = dict(captured)
        self._report = report
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        # A program with one phase needs no phase in its calls.
        self._only_phase = next(iter(table.phases)) if len(table.phases) == 1 else None
        self._closed = False

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """All captured keys."""
        return tuple(self._captured)

    def report(self) -> ProgramReport:
        """Return what the compile did and cost."""
        return self._report

    def inputs(self, key: GraphKey) -> Mapping[str, Tensor]:
        """Return the static input buffers of a bucket, to be written before `replay`; they live as long as the program.

        Buckets share storage: writing one bucket's inputs overwrites another's.
        """
        return self._bucket(key).inputs

    def replay(self, key: GraphKey, step: object = None) -> Any:
        """Run a bucket on the present content of its buffers: nothing is copied in, nothing is sliced.

        Returns the model's output structure at the bucket's shapes, valid until the next replay of this key; an output
        that is a view of an input (a cast to its own dtype is one) until any bucket's inputs are written.
        """
        outputs = self._backend.replay(key, step) if key in self._captured else self._refuse(key)
        bucket = self._captured[key]
        return bucket.output.rebuild(outputs, bucket.inputs)

    def replay_session(self) -> AbstractContextManager[None]:
        """Enter around a run of calls, for devices that prepare something for serving."""
        return self._backend.replay_session()

    def __call__(self, phase: str | None = None, /, **inputs: Tensor) -> Any:
        """Run the model on `inputs`: copy them into the smallest bucket that fits, replay, slice the padding off.

        phase may be left out where the program has one only. Padding is right where the model treats the entries of a
        bucket dimension independently or masks them itself; declaring the dimension states that. Raises `CaptureError`
        where no bucket is large enough and `UsageError` for inputs that differ from their declaration; nothing falls
        back to eager by itself.
        """
        try:
            signature = (phase, *[(name, tensor.shape) for name, tensor in inputs.items()])
            plan = self._plans.get(signature)
        except (AttributeError, TypeError):
            raise self._wrong_call(phase, inputs) from None
        if plan is None:
            phase = self._phase(phase)
            if phase in self._eager:
                return self._run_eager(phase, inputs)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[signature] = self._plan(phase, inputs)
        for name, buffer, dtype in plan.copies:
            tensor = inputs[name]
            if tensor.dtype is not dtype:
                raise self._wrong_dtype(name, tensor, dtype)
            buffer.copy_(tensor.detach() if tensor.requires_grad else tensor)
        for tail, value in plan.fills:
            tail.copy_(value) if isinstance(value, Tensor) else tail.fill_(value)
        outputs: Any = self._backend.replay(plan.key)
        if plan.crops or plan.views_of_inputs:
            outputs = list(outputs)
            for index in plan.views_of_inputs:
                outputs[index] = outputs[index].clone()
            for index, crop in plan.crops:
                outputs[index] = outputs[index][crop]
        return outputs[plan.single] if plan.single >= 0 else plan.output.rebuild(outputs, inputs)

    def close(self) -> None:
        """Drop all captured graphs and return their memory; the program can't be called afterwards."""
        self._backend.cleanup()
        self._captured.clear()
        self._plans.clear()
        self._eager = {}
        self._buffers = None
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

    def _check_names(self, inputs: Mapping[str, Tensor]) -> None:
        if inputs.keys() != self._inputs.keys():
            raise UsageError(
                f"inputs {sorted(inputs)}",
                found=f"the program declares {sorted(self._inputs)}",
                remedy="pass exactly the declared inputs, by name",
            )

    def _run_eager(self, phase: str, inputs: Mapping[str, Tensor]) -> Any:
        self._measure(inputs)
        for name, spec in self._inputs.items():
            if inputs[name].dtype is not spec.dtype:
                raise self._wrong_dtype(name, inputs[name], spec.dtype)
        with torch.no_grad():
            return self._eager[phase](**inputs)

    def _measure(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        self._check_names(inputs)
        sizes: dict[str, int] = {}
        for name, spec in self._inputs.items():
            spec.measure(name, inputs[name].shape, sizes)
        return sizes

    def _plan(self, phase: str, inputs: Mapping[str, Tensor]) -> _Plan:
        sizes = self._measure(inputs)
        key = self._table.find(phase, sizes)
        if key is None:
            largest = self._table.phases[phase][-1]
            raise CaptureError(
                f"running phase {phase!r} with " + ", ".join(f"{k} = {v}" for k, v in sizes.items()),
                found=f"no bucket is that large; the largest is {largest}",
                remedy="compile with a larger bucket, or split the batch",
            )
        bucket = self._captured[key]
        copies = []
        fills: list[tuple[Tensor, int | float | Tensor]] = []
        for name, spec in self._inputs.items():
            buffer, shape = bucket.inputs[name], tuple(inputs[name].shape)
            copies.append((name, buffer[tuple(slice(n) for n in shape)], spec.dtype))
            if tuple(buffer.shape) != shape:
                fills += _padding(name, spec, buffer, shape)
        crops = self._crops(bucket, inputs)
        single = bucket.output.leaves[0].index if bucket.output.is_single else -1
        return _Plan(key, tuple(copies), tuple(fills), crops, bucket.views_of_inputs, bucket.output, single)

    def _crops(self, bucket: CapturedBucket, inputs: Mapping[str, Tensor]) -> tuple[tuple[int, tuple[slice, ...]], ...]:
        padded = any(bucket.inputs[name].shape != inputs[name].shape for name in bucket.traced.shapes)
        if not padded:
            return ()
        symbolic = {(slot.name, slot.dim) for slot in bucket.traced.symbols.values()}
        for name in bucket.traced.shapes:
            for dim, (have, want) in enumerate(zip(bucket.inputs[name].shape, inputs[name].shape, strict=True)):
                if have != want and (name, dim) not in symbolic:
                    raise CaptureError(
                        f"padding input {name!r} from {want} to {have} in dimension {dim}",
                        found="the model was traced for that size only, so what padding does to its outputs is unknown",
                        remedy="pass inputs that fill a bucket exactly, or add a bucket of this size",
                    )
        reason = bucket.traced.branches_differ(inputs)
        if reason is not None:
            raise CaptureError(
                f"padding to {bucket.key}",
                found=f"{reason}, and takes another way at the size before padding",
                remedy="add a bucket of this size",
            )
        crops = enumerate(bucket.traced.crop(inputs))
        return tuple((index, crop) for index, crop in crops if any(part != slice(None) for part in crop))

    def _bucket(self, key: GraphKey) -> CapturedBucket:
        return self._captured[key] if key in self._captured else self._refuse(key)

    def _refuse(self, key: GraphKey) -> Any:
        if self._closed:
            raise CaptureError(f"replaying {key}", found="it was closed", remedy="compile it again")
        raise CaptureError(
            f"replaying {key}",
            found="captured are: " + (", ".join(map(str, self._captured)) or "no keys"),
            remedy="use one of program.keys, or compile with that bucket and a capture mode",
        )

    def _wrong_call(self, phase: object, inputs: Mapping[str, Any]) -> UsageError:
        """Return the error for arguments that are no tensors by name."""
        if phase is not None and not isinstance(phase, str):
            return UsageError(
                f"calling a program with a {type(phase).__name__} in first place",
                found="the first argument names the phase; inputs go by name",
                remedy=f"call it like program({', '.join(f'{name}=…' for name in self._inputs)})",
            )
        self._check_names(inputs)
        name, value = next((n, v) for n, v in inputs.items() if not isinstance(v, Tensor))
        return self._wrong_dtype(name, value, self._inputs[name].dtype)

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


def _padding(
    name: str, spec: InputSpec, buffer: Tensor, shape: tuple[int, ...]
) -> list[tuple[Tensor, int | float | Tensor]]:
    """Return the regions of `buffer` outside `shape` with what each call writes there."""
    if spec.padding == "copy" or (spec.padding == "edge" and 0 in shape):
        raise CaptureError(
            f"input {name!r} of shape {shape}",
            found=f"its bucket holds {tuple(buffer.shape)} and its padding policy is {spec.padding!r}",
            remedy="fill the bucket exactly, or declare another padding",
        )
    if spec.padding == "keep":
        return []
    value = spec.value if spec.padding == "sentinel" else 0
    regions: list[tuple[Tensor, int | float | Tensor]] = []
    # Later dimensions first: what an earlier dimension repeats then has its own padding already.
    for dim in reversed(range(len(shape))):
        if shape[dim] < buffer.shape[dim]:
            real = buffer[tuple(slice(n) for n in shape[:dim])]
            tail = real.narrow(dim, shape[dim], buffer.shape[dim] - shape[dim])
            regions.append((tail, real.narrow(dim, shape[dim] - 1, 1) if spec.padding == "edge" else value))
    return regions
