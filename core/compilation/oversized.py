"""Calls larger than the largest bucket: run eagerly, or split into calls that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from core.compilation.capture.inputs import BucketTable, InputSpec
    from core.compilation.capture.plan import CapturedBucket, Crop, Plan
    from core.compilation.trace.traced import OutputTree


class Eager(NamedTuple):
    """A call that no graph serves."""

    #: Why; "" where the phase's mode is "off".
    reason: str = ""
    #: Whether the call is larger than the largest bucket.
    oversized: bool = False


class Piece(NamedTuple):
    """One of the calls that a split call becomes."""

    start: int
    stop: int
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A call that is split into several consecutive calls, whose outputs are joined."""

    pieces: tuple[Piece, ...]
    #: The dimension of each input that is cut, by name; the others go to each piece whole.
    cuts: Mapping[str, int]
    #: The dimension along which each graph output is joined.
    joins: tuple[int, ...]
    output: OutputTree
    #: The report's name for this kind of call.
    told: str

    def check_step(self, step: Mapping[str, Any] | None) -> None:
        """Refuse host-side arguments: they describe the whole call and can't be split."""
        if step is not None:
            raise CaptureError(
                f"splitting a call that is given step={sorted(step)}",
                found="these host-side arguments are those of the whole call, and each piece needs its own",
                remedy="make calls that fit a bucket, each with its step",
            )

    def run(self, replay: Callable[[Plan, Mapping[str, Tensor]], Any], inputs: Mapping[str, Tensor]) -> Any:
        """Return the model's output structure, of new tensors. replay: makes one call, and returns copies."""
        found: list[list[Any]] = []
        for start, stop, plan in self.pieces:
            found.append(pytree.tree_leaves(replay(plan, cut(inputs, self.cuts, start, stop))))
        joined: dict[int, Tensor] = {}
        for leaf, ref in enumerate(self.output.leaves):
            if ref.index >= 0:
                joined[ref.index] = torch.cat([leaves[leaf] for leaves in found], dim=self.joins[ref.index])
        return self.output.rebuild([joined.get(i, torch.empty(0)) for i in range(len(self.joins))], inputs)


def cut(inputs: Mapping[str, Tensor], cuts: Mapping[str, int], start: int, stop: int) -> dict[str, Tensor]:
    """Return the inputs with entries start to stop of the dimension that is split."""
    return {n: t.narrow(cuts[n], start, stop - start) if n in cuts else t for n, t in inputs.items()}


def split_dimensions(table: BucketTable, inputs: Mapping[str, InputSpec]) -> dict[str, int]:
    """Return the dimension of each input that is cut where calls are split.

    Raises `UsageError` where the declarations already say that the entries can't be computed apart.
    """
    if len(table.dims) != 1:
        found = f"the bucket dimensions are: {', '.join(table.dims) or 'none'}"
        raise _not_splittable(found, "calls are split along exactly one")
    (dim,) = table.dims
    cuts = {}
    for name, spec in inputs.items():
        places = [place for place, size in enumerate(spec.shape) if isinstance(size, str)]
        if len(places) > 1 or any(spec.offset(place) for place in places):
            raise _not_splittable(
                f"input {name!r} of shape {spec.shape} relates entries of {dim!r} to each other",
                "cutting it would lose that",
            )
        if places:
            cuts[name] = places[0]
    return cuts


def join_dimensions(bucket: CapturedBucket, inputs: Mapping[str, Tensor], cuts: Mapping[str, int]) -> tuple[int, ...]:
    """Return the dimension of each graph output that corresponds to the split dimension.

    Raises `CaptureError` for an output with none or several such dimensions, and if they can't be determined.
    """
    largest = bucket.key.dims[0]
    asked = f"splitting a call over {bucket.key}"
    if largest < 2:
        found = "with one entry to a bucket, nothing tells which dimension of an output holds the entries"
        raise CaptureError(asked, found=found, remedy="compile with a larger bucket")
    # The dimension that one entry of padding would cut is the dimension of the entries.
    fewer = {
        name: buffer.narrow(cuts[name], 0, largest - 1) if name in cuts else buffer
        for name, buffer in bucket.inputs.items()
    }
    crops = bucket.cropper.crops(bucket.key, bucket.inputs, {n: t for n, t in fewer.items() if n in inputs})
    crops += [()] * (max(bucket.output.indexes, default=-1) + 1 - len(crops))  # none if the graph reads no split input
    return tuple(_join_dimension(asked, index, crop, largest - 1) for index, crop in enumerate(crops))


def _join_dimension(asked: str, index: int, crop: Crop, size: int) -> int:
    places = [place for place, part in enumerate(crop) if part != slice(None)]
    if len(places) == 1 and crop[places[0]] == slice(size):
        return places[0]
    found = "has no dimension of entries" if not places else "relates entries to each other in its dimensions"
    raise CaptureError(
        asked,
        found=f"output {index} {found}, so the outputs of the pieces can't be joined",
        remedy='compile with a larger bucket, or take oversized="eager"',
    )


def _not_splittable(found: str, why: str) -> UsageError:
    return UsageError(
        "oversized='split'", found=f"{found}; {why}", remedy="take oversized='eager' or oversized='error'"
    )
