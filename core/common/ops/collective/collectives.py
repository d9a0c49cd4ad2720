"""Collectives: `core::all_reduce`, `core::reduce_scatter`, `core::all_gather`, and `core::local_shard` beside them.

A group is the name of a process group of torch.distributed (`ProcessGroup.group_name`), "" for the default one. Where
no process group is initialised, or the group has one process, each op does for one process what its text says: a copy.
All processes of a group call the same collectives in one order, with tensors of one shape and dtype.

Tensor parallelism of linear layers: Shoeybi et al., arXiv 1909.08053. Sequence parallelism, which splits an all-reduce
into a reduce-scatter and an all-gather: Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from core.common.ops.arguments import Draw, check
from core.common.ops.declaration import CanonicalOp, Sample, declare

ALL_REDUCE_SCHEMA = "all_reduce(Tensor x, str group) -> Tensor"
REDUCE_SCATTER_SCHEMA = "reduce_scatter(Tensor x, str group, int dim=0) -> Tensor"
ALL_GATHER_SCHEMA = "all_gather(Tensor x, str group, int dim=0, SymInt? size=None) -> Tensor"
LOCAL_SHARD_SCHEMA = "local_shard(Tensor x, str group, int dim=0) -> Tensor"


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over the processes of `group`, a new contiguous tensor of x's shape and dtype.

    Order of summation, and so the last bits, are the backend's.
    """
    check(not x.is_complex(), "all_reduce", f"x must be real, not {x.dtype}")
    found = _shared(group)
    if found is None:
        return x.clone(memory_format=torch.contiguous_format)
    # Functional collectives, since they are what torch's passes and compilers know; both have fake kernels.
    pending = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", found.group_name)
    out: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return out


def reduce_scatter(x: Tensor, group: str, dim: int = 0) -> Tensor:
    """Return this process's part of the sum of x over the processes of `group`, a new contiguous tensor.

    Dimension `dim`, which the number of processes must divide, is cut into equal parts in the order of ranks.
    """
    check(not x.is_complex(), "reduce_scatter", f"x must be real, not {x.dtype}")
    _check_parts("reduce_scatter", x, group, dim)
    found = _shared(group)
    if found is None:
        return x.clone(memory_format=torch.contiguous_format)
    rows = x.movedim(dim, 0).contiguous()
    pending = torch.ops._c10d_functional.reduce_scatter_tensor(rows, "sum", found.size(), found.group_name)
    part: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return part.movedim(0, dim).contiguous()


def all_gather(x: Tensor, group: str, dim: int = 0, size: int | None = None) -> Tensor:
    """Return the x of all processes of `group`, one after another along `dim` in the order of ranks, contiguous.

    size: of that dimension in the result, for a caller who knows it by another name than "processes times the size of
    x"; another size is an error. None for the product.
    """
    _check_dim("all_gather", x, dim)
    num_processes = group_size(group)
    check(
        size is None or size == x.shape[dim] * num_processes,
        "all_gather",
        f"size {size} is not that of {num_processes} parts of {x.shape[dim]}",
    )
    found = _shared(group)
    if found is None:
        return x.clone(memory_format=torch.contiguous_format)
    rows = x.movedim(dim, 0).contiguous()
    # Gathering moves bytes, and not every backend knows the formats of codes.
    moved = rows.view(torch.uint8) if rows.dtype in _BYTES and rows.dim() else rows
    pending = torch.ops._c10d_functional.all_gather_into_tensor(moved, num_processes, found.group_name)
    whole: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return whole.view(x.dtype).movedim(0, dim).contiguous()


def local_shard(x: Tensor, group: str, dim: int = 0) -> Tensor:
    """Return the part of x that `reduce_scatter` would give this process were x the sum: a copy, nothing is sent."""
    _check_parts("local_shard", x, group, dim)
    found = _shared(group)
    if found is None:
        return x.clone(memory_format=torch.contiguous_format)
    size = x.shape[dim] // found.size()
    return x.narrow(dim, found.rank() * size, size).clone(memory_format=torch.contiguous_format)


_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def group_size(group: str) -> int:
    """Return how many processes a group has; 1 where no process group is initialised."""
    found = _shared(group)
    return 1 if found is None else int(found.size())


def _shared(group: str) -> Any:
    """Return the process group of that name, None if there is nobody to share with."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    # torch resolves names for its own ops alone, and types the result of WORLD as optional though it is set by now.
    resolve: Any = distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: Any = resolve(group) if group else distributed.group.WORLD
    return found if found.size() > 1 else None


def _check_dim(op: str, x: Tensor, dim: int) -> None:
    check(-x.dim() <= dim < x.dim(), op, f"x of shape {tuple(x.shape)} has no dimension {dim}")


def _check_parts(op: str, x: Tensor, group: str, dim: int) -> None:
    _check_dim(op, x, dim)
    size, num_processes = x.shape[dim], group_size(group)
    # A symbolic size must not be asked: the answer would narrow down the sizes that a trace serves.
    fits = not isinstance(size, int) or size % num_processes == 0
    check(fits, op, f"dimension {dim} of x has size {size}, which {num_processes} processes do not divide")


def all_reduce_fake(x: Tensor, group: str) -> Tensor:
    """Check the argument; return x's shape and dtype, contiguous."""
    check(not x.is_complex(), "all_reduce", f"x must be real, not {x.dtype}")
    return x.new_empty(x.shape)


def reduce_scatter_fake(x: Tensor, group: str, dim: int = 0) -> Tensor:
    """Check the arguments; return one part's shape, contiguous. That a symbolic size is divided is not asked."""
    check(not x.is_complex(), "reduce_scatter", f"x must be real, not {x.dtype}")
    return local_shard_fake(x, group, dim, op="reduce_scatter")


def all_gather_fake(x: Tensor, group: str, dim: int = 0, size: int | None = None) -> Tensor:
    """Check the arguments; return the shape of all parts together, contiguous."""
    _check_dim("all_gather", x, dim)
    num_processes, part = group_size(group), x.shape[dim]
    plain = isinstance(size, int) and isinstance(part, int)
    fits = not plain or size == part * num_processes
    check(fits, "all_gather", f"size {size} is not that of {num_processes} parts of {part}")
    return x.new_empty(_resized(x, dim, part * num_processes if size is None else size))


def local_shard_fake(x: Tensor, group: str, dim: int = 0, *, op: str = "local_shard") -> Tensor:
    """Check the arguments; return one part's shape, contiguous. That a symbolic size is divided is not asked."""
    _check_parts(op, x, group, dim)
    num_processes = group_size(group)
    return x.new_empty(x.shape if num_processes == 1 else _resized(x, dim, x.shape[dim] // num_processes))


def _resized(x: Tensor, dim: int, size: Any) -> list[Any]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _samples(draw: Draw, **options: Any) -> Iterator[Sample]:
    yield Sample(name="rows", kwargs={"x": draw(7, 48), "group": ""})
    yield Sample(name="no tokens", kwargs={"x": draw(0, 48), "group": ""})
    yield Sample(name="transposed", kwargs={"x": draw(5, 3, 8).transpose(0, 1), "group": ""})
    if options:
        yield Sample(name="another dimension", kwargs={"x": draw(1, 7, 48), "group": "", **options})


def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield tensors of several ranks for the default group."""
    yield from _samples(Draw(dtype, device, seed=12))


def shard_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield the same, and a batch of one whose tokens are its second dimension."""
    yield from _samples(Draw(dtype, device, seed=13), dim=1)


def gather_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield the same, with and without the size."""
    draw = Draw(dtype, device, seed=14)
    yield from _samples(draw, dim=1)
    yield Sample(name="last dimension, sized", kwargs={"x": draw(7, 48), "group": "", "dim": -1, "size": 48})


ALL_REDUCE = declare(
    CanonicalOp(
        name="all_reduce",
        schema=ALL_REDUCE_SCHEMA,
        reference=all_reduce,
        fake=all_reduce_fake,
        samples=samples,
        break_point=True,
    )
)
REDUCE_SCATTER = declare(
    CanonicalOp(
        name="reduce_scatter",
        schema=REDUCE_SCATTER_SCHEMA,
        reference=reduce_scatter,
        fake=reduce_scatter_fake,
        samples=shard_samples,
        break_point=True,
    )
)
ALL_GATHER = declare(
    CanonicalOp(
        name="all_gather",
        schema=ALL_GATHER_SCHEMA,
        reference=all_gather,
        fake=all_gather_fake,
        samples=gather_samples,
        break_point=True,
    )
)
LOCAL_SHARD = declare(
    CanonicalOp(
        name="local_shard",
        schema=LOCAL_SHARD_SCHEMA,
        reference=local_shard,
        fake=local_shard_fake,
        samples=shard_samples,
    )
)
