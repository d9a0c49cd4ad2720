"""The calls that a canonical op is judged on: its declared samples, larger ones, other strides, NaN and infinity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.declaration import CanonicalOp, Sample
from core.common.ops.implementation import Condition, always
from core_conformance.inputs.large import LARGE, NON_FINITE
from core_conformance.inputs.large_sizes import SIZES
from core_conformance.inputs.large_wide import WIDE
from core_conformance.rules.oracle import faked


def calls(op: CanonicalOp, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Iterator[Sample]:
    """Yield calls with tensors of their own on the device; whoever may write into them copies them first.

    Larger calls have rows as models have them: rounding averages out there, and kernels that only take such sizes
    accept them. Further ones have sizes on both sides of usual tiles, rows past 8,192 columns and more than 2**20
    elements. One larger call comes again with each of its tensors strided otherwise, since a kernel that reads memory
    as if it were contiguous is right on every other call, and again with rows of NaN and infinity.
    """
    declared = list(op.samples(dtype, device))
    large = list(LARGE[op.name](Draw(dtype, device, seed=100 + seed))) if op.name in LARGE else []
    yield from declared
    yield from large
    if op.name in SIZES:
        yield from SIZES[op.name](Draw(dtype, device, seed=200 + seed))
    if op.name in WIDE:
        yield from WIDE[op.name](Draw(dtype, device, seed=300 + seed))
    base = (large or declared)[:1]
    for sample in base:
        yield from strided(op, sample)
        if op.name in NON_FINITE:
            yield with_non_finite(sample, NON_FINITE[op.name])


def strided(op: CanonicalOp, sample: Sample) -> Iterator[Sample]:
    """Yield the call with one tensor argument at a time in other strides: as part of wider rows, and transposed."""
    for name, value in sample.kwargs.items():
        if not isinstance(value, Tensor) or name in op.mutates or not value.numel():
            continue  # the engine chooses the layout of caches
        if not value.dim() or (value.dim() == 1 and not value.is_floating_point()):
            continue  # lengths, slots and offsets are always contiguous
        forms = {"wider rows": part_of_wider_rows(value)}
        if value.dim() > 1 and min(value.shape[-2:]) > 1:
            forms["transposed"] = value.transpose(-1, -2).contiguous().transpose(-1, -2)
        for form, tensor in forms.items():
            yield Sample(name=f"{sample.name}, {name}: {form}", kwargs={**sample.kwargs, name: tensor})


def part_of_wider_rows(value: Tensor) -> Tensor:
    """Return equal values as the middle of rows three times as long; a vector as every second element of one."""
    if value.dim() == 1:
        return torch.stack((value, value.flip(0)), dim=-1)[:, 0]
    width = value.shape[-1]
    return torch.cat((value.flip(-1), value, value.flip(-1)), dim=-1)[..., width : 2 * width]


def with_non_finite(sample: Sample, names: tuple[str, ...]) -> Sample:
    """Return the call with NaN in the second row and infinity in the third of each named tensor."""
    changed = dict(sample.kwargs)
    for name in names:
        tensor = changed[name].clone()
        tensor[..., 1, 3] = torch.nan
        tensor[..., 2, 5] = torch.inf
        changed[name] = tensor
    return Sample(name=f"{sample.name}, rows of NaN and infinity", kwargs=changed)


def refusal(op: CanonicalOp, condition: Condition, kwargs: Mapping[str, Any]) -> str | None:
    """Ask a condition as a compile does, on fake tensors, and return its reason; None where it accepts.

    What the op does not write counts as constant: nothing writes the arguments of a case while it runs.
    """
    if condition is always:  # a condition that always accepts needs no fakes
        return None
    _, fakes = faked(kwargs)
    constants = frozenset(name for name, value in kwargs.items() if isinstance(value, Tensor)) - set(op.mutates)
    return condition(op.bind((), fakes, constants=constants))


def positional(op: CanonicalOp, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments as they stand in a graph: by position as far as the schema has it, else by name."""
    named, args = dict(kwargs), []
    for argument in op.overload._schema.arguments:
        if argument.kwarg_only or argument.name not in named:
            break
        args.append(named.pop(argument.name))
    return tuple(args), named
