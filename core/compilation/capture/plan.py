"""The plan of a call with inputs of given shapes, made once: bucket, copies, padding, and the cut of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.inputs import InputSpec
from core.compilation.trace.traced import OutputTree, TracedGraph
from core.errors import CaptureError

Crop = tuple[slice, ...]


class Plan(NamedTuple):
    """All decisions about a call with inputs of given shapes."""

    #: The graph that is replayed.
    key: GraphKey
    #: Name of each input that is copied, the part of the buffer that it fills, and its dtype.
    copies: tuple[tuple[str, Tensor, torch.dtype], ...]
    #: What is written into the rest of the buffers.
    fills: tuple[tuple[Tensor, int | float | Tensor], ...]
    #: Index of each output that is cut, and its part that belongs to the real inputs.
    crops: tuple[tuple[int, Crop], ...]
    #: Outputs that are cloned, since they lie in an input's buffer or are to outlive the next replay.
    cloned: tuple[int, ...]
    output: OutputTree
    #: Index of the only output, or -1.
    single: int
    #: The dropped smaller bucket that the key's graph replaces.
    wanted: GraphKey | None = None


class Cropper(Protocol):
    """Finds the part of a bucket's outputs that belongs to inputs smaller than the bucket."""

    @property
    def reads(self) -> frozenset[str] | None:
        """Names of the inputs that the graph reads; None for all."""

    def crops(self, key: GraphKey, buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Crop]:
        """Return the part of each output; raise `CaptureError` if it can't be determined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedBucket:
    """One captured key."""

    key: GraphKey
    #: Views of the static input buffers.
    inputs: Mapping[str, Tensor]
    #: Rebuilds the model's output.
    output: OutputTree
    #: Cuts padding off the output.
    cropper: Cropper
    #: Outputs that lie in the memory of an input.
    views_of_inputs: tuple[int, ...] = ()
    #: Everything that the captured graph reads; kept, because a graph of the device holds addresses only.
    values: tuple[Any, ...] = ()


class TracedCropper:
    """Cuts outputs by the symbolic shapes of the trace and the declared shapes of the inputs.

    Where an input declared `"seqs + 1"` has the symbol s0, a size `s0 - 1` of an output is the bucket dimension itself,
    and its padding lies at the end, as the input's does. A size that adds to a symbol (`s0 + 1`) may have its padding
    in between, and is refused.
    """

    def __init__(self, traced: TracedGraph, inputs: Mapping[str, InputSpec]) -> None:
        self._traced = traced
        self.reads: frozenset[str] | None = frozenset(traced.shapes)
        offsets = {symbol: inputs[slot.name].offset(slot.dim) for symbol, slot in traced.symbols.items()}
        self._dims = tuple(symbol - offset for symbol, offset in offsets.items() if offset)

    def crops(self, key: GraphKey, buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Crop]:
        """Cut an output where its size is that of a symbolic dimension.

        Raises `CaptureError` where the trace fixed a size that is padded, or takes another branch at the real sizes.
        """
        traced = self._traced
        names = traced.shapes.keys() & inputs.keys()  # an input declared "bound" may be left out, and is never padded
        if all(buffers[name].shape == inputs[name].shape for name in names):
            return []
        symbolic = {(slot.name, slot.dim) for slot in traced.symbols.values()}
        for name in sorted(names):
            for dim, (have, want) in enumerate(zip(buffers[name].shape, inputs[name].shape, strict=True)):
                if have != want and (name, dim) not in symbolic:
                    raise CaptureError(
                        f"padding input {name!r} from {want} to {have} in dimension {dim}",
                        found="the model was traced for that size only, so what padding does to its outputs is unknown",
                        remedy="pass inputs that fill a bucket exactly, or add a bucket of this size",
                    )
        reason = traced.why_branches_differ(inputs, self._dims)
        if reason is not None:
            raise CaptureError(
                f"padding to {key}",
                found=f"{reason}, and takes another way at the size before padding",
                remedy="add a bucket of this size",
            )
        return traced.crop(inputs, self._dims)


def make_plan(
    key: GraphKey,
    inputs: Mapping[str, Tensor],
    *,
    specs: Mapping[str, InputSpec],
    buffers: Mapping[str, Tensor],
    output: OutputTree,
    cropper: Cropper,
    cloned: tuple[int, ...],
    wanted: GraphKey | None = None,
) -> Plan:
    """Return the plan of a call; raise `CaptureError` where padding or cutting it would be a guess."""
    copies = []
    fills: list[tuple[Tensor, int | float | Tensor]] = []
    for name, spec in specs.items():
        if spec.padding == "bound":
            continue
        buffer, shape = buffers[name], tuple(inputs[name].shape)
        if cropper.reads is None or name in cropper.reads:
            copies.append((name, buffer[tuple(slice(n) for n in shape)], spec.dtype))
        if tuple(buffer.shape) != shape:
            fills += _padding(name, spec, buffer, shape)
    crops = enumerate(cropper.crops(key, buffers, inputs))
    return Plan(
        key=key,
        copies=tuple(copies),
        fills=tuple(fills),
        crops=tuple((index, crop) for index, crop in crops if any(part != slice(None) for part in crop)),
        cloned=cloned,
        output=output,
        single=output.leaves[0].index if output.is_single else -1,
        wanted=wanted,
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
    # Later dimensions first, so that the rows that an earlier dimension repeats are already padded.
    for dim in reversed(range(len(shape))):
        if shape[dim] < buffer.shape[dim]:
            real = buffer[tuple(slice(n) for n in shape[:dim])]
            tail = real.narrow(dim, shape[dim], buffer.shape[dim] - shape[dim])
            regions.append((tail, real.narrow(dim, shape[dim] - 1, 1) if spec.padding == "edge" else value))
    return regions
