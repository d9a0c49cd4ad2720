"""Calls of a program: decides once per form of call what it does, and says why a call is refused."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core.compilation.capture.plan import CapturedBucket, Plan, make_plan
from core.compilation.oversized import Eager, Piece, Split, cut, join_dimensions, split_dimensions
from core.errors import CaptureError, CoreError, UsageError

if TYPE_CHECKING:
    import torch

    from core.common.graphs.backend import GraphKey, KeyGuards
    from core.compilation.request import CompileRequest

INDEPENDENT = "batch"
"""The name of a bucket dimension whose entries never depend on each other."""
FEWER_GRAPHS = "declare fewer buckets, or free other programs of the process; every graph takes streams of the device"


class Calls:
    """What a program may be called with, and which captured bucket serves a call; holds no model."""

    def __init__(
        self,
        request: CompileRequest,
        modes: Mapping[str, str],
        captured: Mapping[GraphKey, CapturedBucket],
        dropped: Mapping[GraphKey, str],
    ) -> None:
        """dropped: buckets that could not be captured, each with the reason; larger buckets serve their calls."""
        self.table = request.table
        self.captured_table = request.table.without(dropped)
        self.inputs = dict(request.inputs)
        self.bound = dict(request.bound)
        self.dropped = dict(dropped)
        self.captured = dict(captured)
        self._modes = dict(modes)
        self._strict = request.options.strict
        self._oversized, self._cuts = _when_oversized(request)
        #: Whether splitting was asked for by name, so that what can't be split is refused.
        self._must_split = request.options.oversized == "split"

    def by_name(
        self, phase: object, values: tuple[object, ...], inputs: Mapping[str, Tensor]
    ) -> tuple[str | None, dict[str, Tensor]]:
        """Return phase and inputs of a call whose inputs were given by place, in the order of their declaration."""
        given = values if phase is None or isinstance(phase, str) else (phase, *values)
        names = [name for name in self.inputs if name not in self.bound]
        twice = sorted(inputs.keys() & set(names[: len(given)]))
        if len(given) > len(names) or twice:
            raise UsageError(
                f"calling a program with {len(given)} inputs by place",
                found=f"{twice[0]!r} is given by name too" if twice else f"it declares {', '.join(names) or 'none'}",
                remedy=f"call it like program({', '.join(names)}), or by name",
            )
        named: dict[str, Any] = dict(zip(names, given, strict=False))
        return (phase if isinstance(phase, str) else None), {**named, **inputs}

    def plan(self, phase: str, guards: Mapping[str, Hashable], inputs: Mapping[str, Tensor]) -> Plan | Split | Eager:
        """Return what a call does: a replay, several, or an eager run where the mode says so or no graph may serve."""
        sizes = self.measure(inputs)
        values = self.table.check_guards(phase, guards)
        if self._modes[phase] == "off":
            return Eager()
        wanted = self.table.find(phase, sizes, values)
        largest = self._largest(phase, values) if wanted is None else None
        try:
            if largest is not None and self._oversized == "split":
                return self._split(largest, sizes, inputs)
            return self._captured_plan(phase, values, sizes, inputs, copied=False)
        except CaptureError as error:
            if self._strict or (largest is not None and (self._oversized == "error" or self._must_split)):
                raise
            # The error text holds sizes, of which there may be many.
            return Eager(f"{phase}: {error.found}", oversized=largest is not None)

    def measure(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the sizes of the bucket dimensions in a call; raise `UsageError` for inputs other than declared."""
        self._check_names(inputs)
        sizes: dict[str, int] = {}
        for name, tensor in inputs.items():
            self.inputs[name].measure(name, tensor.shape, sizes)
        return sizes

    def check_dtypes(self, inputs: Mapping[str, Tensor]) -> None:
        """Refuse inputs of another dtype than declared."""
        for name, tensor in inputs.items():
            if tensor.dtype is not self.inputs[name].dtype:
                raise wrong_dtype(name, tensor, self.inputs[name].dtype)

    def check_bound(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> None:
        """Refuse any other tensor for an input whose memory the graphs read directly; such an input may be left out."""
        for name in self.bound.keys() & inputs.keys():
            bound = self.bound[name]
            if inputs[name].data_ptr() != bound.data_ptr():
                raise CaptureError(
                    f"input {name!r} at {inputs[name].data_ptr():#x}",
                    found=f"it is bound: {key} reads the tensor at {bound.data_ptr():#x} that was given at compile",
                    remedy="write into that tensor in place, or leave the input out of the call",
                )

    def wrong(self, phase: object, inputs: Mapping[str, Any], guards: object = None) -> CoreError:
        """Return the error for a call whose arguments are not tensors given by name."""
        if phase is not None and not isinstance(phase, str):
            return UsageError(
                f"calling a program with a {type(phase).__name__} in first place",
                found="the first argument names the phase; inputs go by name",
                remedy=f"call it like program({', '.join(f'{name}=…' for name in self.inputs)})",
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
        return wrong_dtype(*wrong[0], self.inputs[wrong[0][0]].dtype)

    def close(self) -> None:
        """Release the captured buckets and the bound tensors."""
        self.captured.clear()
        self.bound.clear()

    def _check_names(self, inputs: Mapping[str, Tensor]) -> None:
        if not self.inputs.keys() - self.bound.keys() <= inputs.keys() <= self.inputs.keys():
            raise UsageError(
                f"inputs {sorted(inputs)}",
                found=f"the program declares {sorted(self.inputs)}",
                remedy="pass exactly the declared inputs, by name",
            )

    def _largest(self, phase: str, guards: KeyGuards) -> GraphKey | None:
        return next((key for key in reversed(self.table.phases[phase]) if key.guards == guards), None)

    def _split(self, largest: GraphKey, sizes: Mapping[str, int], inputs: Mapping[str, Tensor]) -> Split:
        """Return the calls into which a call larger than the largest bucket is split."""
        (total,), (most,) = sizes.values(), largest.dims
        used = self.captured_table.find(largest.phase, self.table.sizes(largest), largest.guards)
        if used is None:
            raise self._no_bucket(largest.phase, largest.guards, sizes, largest)
        bucket, pieces = self.captured[used], []
        for start in range(0, total, most):
            stop = min(start + most, total)
            part = cut(inputs, self._cuts, start, stop)
            plan = self._captured_plan(largest.phase, largest.guards, self.measure(part), part, copied=True)
            pieces.append(Piece(start, stop, plan))
        return Split(
            pieces=tuple(pieces),
            cuts=self._cuts,
            joins=join_dimensions(bucket, inputs, self._cuts),
            output=bucket.output,
            told=f"{largest.phase}: larger than {largest}, split into calls that fit",
        )

    def _captured_plan(
        self,
        phase: str,
        guards: KeyGuards,
        sizes: Mapping[str, int],
        inputs: Mapping[str, Tensor],
        *,
        copied: bool,
    ) -> Plan:
        wanted = self.table.find(phase, sizes, guards)
        key = self.captured_table.find(phase, sizes, guards)
        if key is None:
            raise self._no_bucket(phase, guards, sizes, wanted)
        bucket = self.captured[key]
        return make_plan(
            key,
            {**self.bound, **inputs},
            specs=self.inputs,
            buffers=bucket.inputs,
            output=bucket.output,
            cropper=bucket.cropper,
            cloned=bucket.output.indexes if copied else bucket.views_of_inputs,
            wanted=wanted if wanted != key else None,
        )

    def _no_bucket(
        self, phase: str, guards: KeyGuards, sizes: Mapping[str, int], wanted: GraphKey | None
    ) -> CaptureError:
        asked = f"running phase {phase!r} with " + ", ".join(f"{k} = {v}" for k, v in (*sizes.items(), *guards))
        if wanted is not None:
            found = f"its buckets could not be captured: {self.dropped[wanted]}"
            return CaptureError(asked, found=found, remedy=FEWER_GRAPHS)
        largest = self._largest(phase, guards)
        if largest is None:
            given = ", ".join(f"{name} = {value}" for name, value in guards)
            return CaptureError(
                asked,
                found=f"not captured with {given}; captured are: {', '.join(map(str, self.captured))}",
                remedy="compile with this value too: options=core.CompileOptions(guards={name: (value, …)})",
            )
        return CaptureError(
            asked,
            found=f"no bucket is that large; the largest is {largest}",
            remedy="compile with a larger bucket, or let calls be split: "
            "options=core.CompileOptions(oversized='split')",
        )


def _when_oversized(request: CompileRequest) -> tuple[str, Mapping[str, int]]:
    """Return what becomes of calls that no bucket holds, and the dimension of each input that is cut."""
    asked, table, inputs = request.options.oversized, request.table, dict(request.inputs)
    if asked == "split":
        return asked, split_dimensions(table, inputs)
    if asked is None and table.dims == (INDEPENDENT,):
        try:
            return "split", split_dimensions(table, inputs)
        except UsageError:
            return "eager", {}
    return asked or "eager", {}


def wrong_dtype(name: str, found: object, wanted: torch.dtype) -> UsageError:
    """Return the error for an input that is no tensor of the declared dtype."""
    if not isinstance(found, Tensor):
        return UsageError(
            f"input {name!r}", found=f"a {type(found).__name__}", remedy=f"pass a torch tensor of {wanted}"
        )
    return UsageError(
        f"input {name!r} of {found.dtype}",
        found=f"the program declares {wanted}",
        remedy="convert it first; a silent cast could change results",
    )
