"""Calls of a program: what each form of call does, decided once, and what is wrong with one that can't be made."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core.compilation.capture.plan import Plan, make_plan
from core.errors import CaptureError, CoreError, UsageError

if TYPE_CHECKING:
    import torch

    from core.common.graphs.backend import GraphKey, Guards
    from core.compilation.capture.plan import Cropper
    from core.compilation.request import CompileRequest
    from core.compilation.trace.traced import OutputTree

FEWER_GRAPHS = "declare fewer buckets, or free other programs of the process; every graph takes streams of the device"


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


class Calls:
    """What a program takes, and which captured bucket serves it. Holds no model, and of tensors the bound ones only.

    dropped: buckets that could not be captured while others were, each with the reason; larger ones serve.
    """

    def __init__(
        self,
        request: CompileRequest,
        modes: Mapping[str, str],
        captured: Mapping[GraphKey, CapturedBucket],
        dropped: Mapping[GraphKey, str],
    ) -> None:
        self.table = request.table
        self.captured_table = request.table.without(dropped)
        self.inputs = dict(request.inputs)
        self.bound = dict(request.bound)
        self.dropped = dict(dropped)
        self.captured = dict(captured)
        self._modes = dict(modes)
        self._strict = request.options.strict

    def plan(self, phase: str, guards: Mapping[str, Hashable], inputs: Mapping[str, Tensor]) -> Plan | str:
        """Return the plan of a call; "" where the phase's mode is "off"; the reason where there is no graph for it."""
        sizes = self.measure(inputs)
        values = self.table.check_guards(phase, guards)
        if self._modes[phase] == "off":
            return ""
        try:
            return self._captured_plan(phase, values, sizes, inputs)
        except CaptureError as error:
            if self._strict:
                raise
            return f"{phase}: {error.found}"  # what was asked holds the sizes, of which there may be many

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
        """Refuse another tensor in place of one whose memory the graphs read; a bound input need not be given."""
        for name in self.bound.keys() & inputs.keys():
            bound = self.bound[name]
            if inputs[name].data_ptr() != bound.data_ptr():
                raise CaptureError(
                    f"input {name!r} at {inputs[name].data_ptr():#x}",
                    found=f"it is bound: {key} reads the tensor at {bound.data_ptr():#x} that was given at compile",
                    remedy="write into that tensor in place, or leave the input out of the call",
                )

    def wrong(self, phase: object, inputs: Mapping[str, Any], guards: object = None) -> CoreError:
        """Return the error for arguments that are no tensors by name."""
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
        """Let go of the captured buckets and the bound tensors."""
        self.captured.clear()
        self.bound.clear()

    def _check_names(self, inputs: Mapping[str, Tensor]) -> None:
        if not self.inputs.keys() - self.bound.keys() <= inputs.keys() <= self.inputs.keys():
            raise UsageError(
                f"inputs {sorted(inputs)}",
                found=f"the program declares {sorted(self.inputs)}",
                remedy="pass exactly the declared inputs, by name",
            )

    def _captured_plan(
        self, phase: str, guards: Guards, sizes: Mapping[str, int], inputs: Mapping[str, Tensor]
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
            views_of_inputs=bucket.views_of_inputs,
            wanted=wanted if wanted != key else None,
        )

    def _no_bucket(self, phase: str, guards: Guards, sizes: Mapping[str, int], wanted: GraphKey | None) -> CaptureError:
        asked = f"running phase {phase!r} with " + ", ".join(f"{k} = {v}" for k, v in (*sizes.items(), *guards))
        if wanted is not None:
            found = f"its buckets could not be captured: {self.dropped[wanted]}"
            return CaptureError(asked, found=found, remedy=FEWER_GRAPHS)
        alike = [known for known in self.table.phases[phase] if known.guards == guards]
        if not alike:
            given = ", ".join(f"{name} = {value}" for name, value in guards)
            return CaptureError(
                asked,
                found=f"not captured with {given}; captured are: {', '.join(map(str, self.captured))}",
                remedy="compile with this value too: options=core.CompileOptions(guards={name: (value, …)})",
            )
        return CaptureError(
            asked,
            found=f"no bucket is that large; the largest is {alike[-1]}",
            remedy="compile with a larger bucket, or split the batch",
        )


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
