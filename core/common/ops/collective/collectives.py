"""Collectives: `core::all_reduce`, `core::reduce_scatter`, `core::all_gather`, and `core::local_shard` beside them.

A group is the name of a process group of torch.distributed (`ProcessGroup.group_name`), "" for the default one. Where
no process group is initialised, or the group has one process, each op does for one process what its text says: a copy.
All processes of a group call the same collectives in one order, with tensors of one shape and dtype.

Tensor parallelism of linear layers: Shoeybi et al., arXiv 1909.08053. Sequence parallelism, which splits an all-reduce
into a reduce-scatter and an all-gather: Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from core.common.ops.arguments import Draw, check
from core.common.ops.declaration import CanonicalOp, declare


def _or_copy(among: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function of a group's name, called with the process group; a copy of x where nobody shares it."""

    @functools.wraps(among)
    def run(x: Tensor, group: str, *where: Any, **named: Any) -> Tensor:
        found = shared_group(group)
        if found is None:
            return x.clone(memory_format=torch.contiguous_format)
        return among(x, found, *where, **named)

    return run


# Functional collectives, since they are what torch's passes and compilers know; all have fake kernels.
_c10d = torch.ops._c10d_functional


@_or_copy
def all_reduce(x: Tensor, group: Any) -> Tensor:
    """Return the sum of x over the processes of `group`, a new contiguous tensor of x's shape and dtype.

    Order of summation, and so the last bits, are the backend's.
    """
    out: Tensor = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group.group_name))
    return out


@_or_copy
def reduce_scatter(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """Return this process's part of the sum of x over the processes of `group`, a new contiguous tensor.

    Dimension `dim`, which the number of processes must divide, is cut into equal parts in the order of ranks.
    """
    rows = x.movedim(dim, 0).contiguous()
    part: Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(rows, "sum", group.size(), group.group_name))
    return part.movedim(0, dim).contiguous()


@_or_copy
def all_gather(x: Tensor, group: Any, dim: int = 0, size: int | None = None) -> Tensor:
    """Return the x of all processes of `group`, one after another along `dim` in the order of ranks, contiguous.

    size: of that dimension in the result, where the caller has a name of its own for "processes times the size of x";
    another number is an error. None for the product.
    """
    rows = x.movedim(dim, 0).contiguous()
    # Gathering moves bytes, and not every backend knows the formats of codes.
    moved = rows.view(torch.uint8) if rows.dtype in _BYTES and rows.dim() else rows
    whole: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(moved, group.size(), group.group_name))
    return whole.view(x.dtype).movedim(0, dim).contiguous()


@_or_copy
def local_shard(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """Return the part of x that `reduce_scatter` would give this process were x the sum: a copy, nothing is sent."""
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def group_size(group: str) -> int:
    """Return how many processes a group has; 1 where no process group is initialised."""
    found = shared_group(group)
    return 1 if found is None else int(found.size())


def shared_group(group: str) -> Any:
    """Return the process group of torch that a collective names, None if there is nobody to share with."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    # torch resolves names for its own ops alone, and types the result of WORLD as optional though it is set by now.
    resolve: Any = distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: Any = resolve(group) if group else distributed.group.WORLD
    return found if found.size() > 1 else None


def _check_real(op: str, x: Tensor) -> None:
    check(not x.is_complex(), op, f"x must be real, not {x.dtype}")


def _check_dim(op: str, x: Tensor, dim: int) -> None:
    check(-x.dim() <= dim < x.dim(), op, f"x of shape {tuple(x.shape)} has no dimension {dim}")


def _check_shard(x: Tensor, group: str, dim: int = 0, *, op: str = "local_shard") -> None:
    _check_dim(op, x, dim)
    size, num_processes = x.shape[dim], group_size(group)
    # A symbolic size must not be asked: the answer would narrow down the sizes that a trace serves.
    fits = not isinstance(size, int) or size % num_processes == 0
    check(fits, op, f"dimension {dim} of x has size {size}, which {num_processes} processes do not divide")


def _check_reduce(x: Tensor, group: str) -> None:
    _check_real("all_reduce", x)


def _check_scatter(x: Tensor, group: str, dim: int = 0) -> None:
    _check_real("reduce_scatter", x)
    _check_shard(x, group, dim, op="reduce_scatter")


def _check_gather(x: Tensor, group: str, dim: int = 0, size: int | None = None) -> None:
    _check_dim("all_gather", x, dim)
    num_processes, part = group_size(group), x.shape[dim]
    # Nor must these.
    fits = not isinstance(size, int) or not isinstance(part, int) or size == part * num_processes
    check(fits, "all_gather", f"size {size} is not that of {num_processes} parts of {part}")


def _reduce_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _gather_fake(x: Tensor, group: str, dim: int = 0, size: int | None = None) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] * group_size(group) if size is None else size))


def _shard_fake(x: Tensor, group: str, dim: int = 0) -> Tensor:
    num_processes = group_size(group)
    return x.new_empty(x.shape if num_processes == 1 else _resized(x, dim, x.shape[dim] // num_processes))


def _resized(x: Tensor, dim: int, size: Any) -> list[Any]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _reduce_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return tensors of several ranks for the default group."""
    return {
        "rows": {"x": draw(7, 48), "group": ""},
        "no tokens": {"x": draw(0, 48), "group": ""},
        "transposed": {"x": draw(5, 3, 8).transpose(0, 1), "group": ""},
    }


def _shard_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the same, and a batch of one whose tokens are its second dimension."""
    return _reduce_calls(draw) | {"another dimension": {"x": draw(1, 7, 48), "group": "", "dim": 1}}


def _gather_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the same, with and without the size."""
    sized = {"group": "", "dim": -1, "size": 48}
    return _shard_calls(draw) | {"last dimension, sized": {"x": draw(7, 48), **sized}}


ALL_REDUCE = declare(
    CanonicalOp(
        schema="all_reduce(Tensor x, str group) -> Tensor",
        reference=all_reduce,
        fake=_reduce_fake,
        check=_check_reduce,
        calls=_reduce_calls,
        seed=12,
        break_point=True,
    )
)
REDUCE_SCATTER = declare(
    CanonicalOp(
        schema="reduce_scatter(Tensor x, str group, int dim=0) -> Tensor",
        reference=reduce_scatter,
        fake=_shard_fake,
        check=_check_scatter,
        calls=_shard_calls,
        seed=13,
        break_point=True,
    )
)
ALL_GATHER = declare(
    CanonicalOp(
        schema="all_gather(Tensor x, str group, int dim=0, SymInt? size=None) -> Tensor",
        reference=all_gather,
        fake=_gather_fake,
        check=_check_gather,
        calls=_gather_calls,
        seed=14,
        break_point=True,
    )
)
LOCAL_SHARD = declare(
    CanonicalOp(
        schema="local_shard(Tensor x, str group, int dim=0) -> Tensor",
        reference=local_shard,
        fake=_shard_fake,
        check=_check_shard,
        calls=_shard_calls,
        seed=13,
    )
)
