"""`core::all_reduce`: the sum of a tensor over the processes of a group, where tensor parallelism needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from core.common.ops.arguments import Draw, check
from core.common.ops.declaration import CanonicalOp, Sample, declare

SCHEMA = "all_reduce(Tensor x, str group) -> Tensor"


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over the processes of `group`, a new tensor of x's shape and dtype; x stays as it is.

    group: the name of a process group of torch.distributed (`ProcessGroup.group_name`), "" for the default one. Where
    no process group is initialised, or the group has one process, the result is a copy of x. All processes must call
    with one shape and dtype, in one order. Order of summation, and so the last bits, are the backend's.
    """
    check(not x.is_complex(), "all_reduce", f"x must be real, not {x.dtype}")
    name = _name_if_shared(group)
    if name is None:
        return x.clone(memory_format=torch.contiguous_format)
    # Functional collectives, since they are what torch's passes and compilers know; both have fake kernels.
    pending = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", name)
    out: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return out


def _name_if_shared(group: str) -> str | None:
    """Return the group's name in torch.distributed, None if there is nobody to share with."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    # torch resolves names for its own ops alone, and types the result of WORLD as optional though it is set by now.
    resolve: Any = distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: Any = resolve(group) if group else distributed.group.WORLD
    return str(found.group_name) if found.size() > 1 else None


def all_reduce_fake(x: Tensor, group: str) -> Tensor:
    """Check the argument; return x's shape and dtype, contiguous."""
    check(not x.is_complex(), "all_reduce", f"x must be real, not {x.dtype}")
    return x.new_empty(x.shape)


def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield tensors of several ranks for the default group."""
    draw = Draw(dtype, device, seed=12)
    yield Sample(name="rows", kwargs={"x": draw(7, 48), "group": ""})
    yield Sample(name="no tokens", kwargs={"x": draw(0, 48), "group": ""})
    yield Sample(name="transposed", kwargs={"x": draw(5, 3, 8).transpose(0, 1), "group": ""})


ALL_REDUCE = declare(
    CanonicalOp(
        name="all_reduce",
        schema=SCHEMA,
        reference=all_reduce,
        fake=all_reduce_fake,
        samples=samples,
        break_point=True,
    )
)
