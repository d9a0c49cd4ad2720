"""Area ops: each collective op alone, its reference and the device's implementations, against one process's formula.

Every rank makes the tensors of all ranks, of which it hands in its own; what they have together it computes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp, declared_ops
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core.engine.models.distributed import Processes
from core_conformance.cases.ops.collect import RULES, candidates, slug
from core_conformance.cases.processes.part import Part
from core_conformance.dtypes import DTYPES, dtype_name, refused_dtype
from core_conformance.inputs.opcalls import calls, positional, refusal
from core_conformance.rules import contract, oracle
from core_conformance.rules.judging import Judged, by_t1, each_value
from core_conformance.rules.oracle import leaves, run_fake
from core_conformance.trial import NotSupported, Trial

Arguments = Mapping[str, Any]

_OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(("all_gather_linear", "linear_reduce_scatter"), ("x", "weight", "bias"))
)
"""Arguments that each rank has for itself, by op; of all others x alone."""
_CUTS = ("reduce_scatter", "local_shard", "linear_reduce_scatter")
"""Ops that give each rank its part of a dimension."""


def parts(device: Device) -> Iterator[Part]:
    """Yield a part for the reference and for each implementation of each collective op, in each dtype."""
    for op in OPS:
        if not op.is_collective:
            continue
        for name, of in {"reference": None, **candidates(op, device)}.items():
            for dtype in DTYPES:
                yield Part(
                    id=f"ops/processes/{op.name}/{slug(name)}/{dtype_name(dtype)}",
                    what=f"core::{op.name} by {name!r}",
                    run=partial(judge_op, op=op, of=of, dtype=dtype),
                    not_supported=refused_dtype(device, dtype),
                )


def judge_op(
    trial: Trial, place: Processes, *, op: CanonicalOp, of: OpImplementation | None, dtype: torch.dtype
) -> None:
    """Judge every call that the implementation takes. of: None for the op's reference.

    Raises `NotSupported` where it takes none, or where what it needs is not installed.
    """
    if of is not None and of.missing:
        raise NotSupported(of.missing)
    refused, admitted = "", 0
    for sample in calls(op, dtype, trial.device.torch_device, trial.seed):
        each = [of_rank(op, sample.kwargs, rank, place.size) for rank in range(place.size)]
        reason = None if of is None else refusal(op, of.condition, each[place.rank])
        if reason is not None:
            refused = reason
            continue
        admitted += 1
        _judge_call(trial, place.rank, op, sample.name, each, of)
    if not admitted:
        raise NotSupported(refused)


def of_rank(op: CanonicalOp, kwargs: Arguments, rank: int, size: int) -> dict[str, Any]:
    """Return a call's arguments as a rank has them: strides stay, values are the rank's own, sizes can be divided."""
    own, dim = oracle.own(kwargs), kwargs.get("dim", 0)
    for name in _OWN.get(op.name, ("x",)):
        value = own.get(name)
        if isinstance(value, Tensor):
            # Powers of two, so that nothing is rounded, and the sum of all is no larger than one was.
            value.copy_(value.roll(rank, -1) * 2.0 ** -(rank + 1))
    if op.name in _CUTS and own["x"].shape[dim] % size:
        own["x"] = torch.cat([own["x"]] * size, dim)
    if own.get("size") is not None:
        own["size"] *= size
    return own


def whole(op: CanonicalOp, rank: int, each: Sequence[Arguments]) -> Any:
    """Return what a rank is to get, computed from the arguments of all ranks."""
    mine = dict(each[rank])
    dim, xs = mine.get("dim", 0), [arguments["x"] for arguments in each]

    def part(x: Tensor) -> Tensor:
        return x.chunk(len(each), dim)[rank].contiguous()

    if op.name == "local_shard":
        return part(mine["x"])
    if op.name == "all_gather":
        return torch.cat(xs, dim)
    if op.name == "all_gather_linear":
        gathered = torch.cat(xs, dim)
        return functional.linear(gathered, mine["weight"], mine["bias"]), gathered
    if op.name == "linear_reduce_scatter":
        return part(_sum([functional.linear(a["x"], a["weight"], a["bias"]) for a in each]))
    total = _sum(xs)
    if op.name in ("all_reduce", "reduce_scatter"):
        return total if op.name == "all_reduce" else part(total)
    del mine["group"]
    return _ending(op)(**{**mine, "x": total})


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of ranks."""
    total = parts[0].contiguous()
    for part in parts[1:]:
        total = total + part
    return total


def _ending(op: CanonicalOp) -> Callable[..., Any]:
    """Return the op that the name of an all-reduce with more ends in."""
    ends, declared = op.name.removeprefix("all_reduce_"), declared_ops()
    if f"core::{ends}" in declared:
        return declared[f"core::{ends}"].reference
    first, codes = declared[f"core::{ends.removesuffix('_quantize_fp4')}"], declared["core::quantize_fp4"]

    def both(*, scale: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
        values, *rest = first.reference(**kwargs)
        return (*codes.reference(values, scale), *rest)

    return both


def _judge_call(
    trial: Trial,
    rank: int,
    op: CanonicalOp,
    name: str,
    each: Sequence[dict[str, Any]],
    of: OpImplementation | None,
) -> None:
    """Judge this rank's results of one call, which all ranks make, by T1."""
    args, named = positional(op, oracle.own(each[rank]))
    results = leaves((op.reference if of is None else of.fn)(*args, **named))
    trial.device.synchronize()
    if not contract.check_metadata(trial, name, results, leaves(run_fake(op.overload, *positional(op, each[rank])))):
        return
    # The fp64 run converts tensors that are arguments themselves.
    flat = {f"{key} {number}": value for number, kwargs in enumerate(each) for key, value in kwargs.items()}
    exact = cache(lambda: oracle.exact(lambda **wide: whole(op, rank, _nested(wide, len(each))), flat)[0])
    judged = Judged(
        name,
        each[rank],
        results,
        leaves(whole(op, rank, each)),
        lambda: leaves(exact()),
        partial(by_t1, slack=1.0 if of is None else of.slack),
    )
    RULES.get(op.name, each_value)(trial, judged)


def _nested(flat: Arguments, size: int) -> list[dict[str, Any]]:
    """Return the arguments of each rank."""
    nested: list[dict[str, Any]] = [{} for _ in range(size)]
    for key, value in flat.items():
        name, _, number = key.rpartition(" ")
        nested[int(number)][name] = value
    return nested
