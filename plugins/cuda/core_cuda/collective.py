"""`core::all_reduce` through memory that the GPUs of a host share, for what is small.

One kernel, where NCCL's protocol makes several round trips; it sums in the order of ranks, so that all get the same
bits. It sends to each GPU as much as there is, so from some size on NCCL is faster (`MOST_BYTES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from core.common.ops.collective import ALL_REDUCE
from core.common.ops.implementation import OpCall, OpImplementation
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.summing import Shares, launch_sum, shares_of
from core_cuda.symmetric import Shared, join, shared_memory

MOST_BYTES: Mapping[int, int] = MappingProxyType({2: 2**23, 4: 2**22, 8: 2**18})
"""Of x, by the number of GPUs, up to which the kernel is used: measured for 2 and 4 (docs/tensor_parallel.md), for 8
the limit of torch's own choice between its ways (`kOneShotThreshBytes` of its intra-node communication)."""


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call, or None; joins the GPUs of the group.

    call: as it stands in the graph.
    """
    x = call.args["x"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and the kernel sums {', '.join(map(str, DTYPES))}"
    return join(call.args["group"]) or None


def by_kernel(x: Tensor, group: str, width: int = 0) -> tuple[Shared, Shares] | None:
    """Return the memory and the shares with which the kernel sums x, None where NCCL is to do so.

    width: of rows that are to be normalised; 0 where there are none. It is the same on all GPUs, or they would wait for
    each other: so nothing is asked of x but its shape and dtype.
    """
    shared = shared_memory(group)
    if shared is None or x.numel() * x.element_size() > MOST_BYTES[shared.size]:
        return None
    shares = shares_of(shared, x.numel(), x.element_size(), width)
    return None if shares is None else (shared, shares)


@kernel_of(ALL_REDUCE)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum by the kernel what is small enough, and by NCCL what is not."""
    way = by_kernel(x, group)
    if way is None:
        return ALL_REDUCE.reference(x, group)  # type: ignore[no-any-return]
    x = x.contiguous()
    out = torch.empty_like(x)
    launch_sum(*way, x, out)
    return out


IMPLEMENTATIONS = (
    OpImplementation(op=ALL_REDUCE.qualified_name, name="cuda_all_reduce", fn=all_reduce, condition=why_not),
)
