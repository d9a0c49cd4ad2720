"""`core::all_reduce` through memory that the GPUs of a host share (torch's symmetric memory), for what is small.

A GPU reads the parts of all others over NVLink and sums them itself, in the order of ranks, so that all get the same
bits: torch's `symm_mem::one_shot_all_reduce_copy`, one kernel, where NCCL's protocol makes several round trips. It
reads as often as there are GPUs, so from some size on NCCL is faster (`MOST_BYTES`). NVLink's multicast is never used.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed

from core.common.ops.collective import ALL_REDUCE
from core.common.ops.collective.collectives import shared_group
from core.common.ops.implementation import OpCall, OpImplementation
from core.errors import LoweringError
from core_cuda.ops.registration import kernel_of

log = logging.getLogger("core.cuda")

MOST_BYTES: Mapping[int, int] = MappingProxyType({2: 2**22, 4: 2**18, 8: 2**18})
"""Of x, by the number of GPUs, up to which the kernel is used: measured for 2 (docs/tensor_parallel.md), for more
the limit of torch's own choice between its ways (`kOneShotThreshBytes` of its intra-node communication)."""
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 4
"""Bytes of which the kernel moves whole multiples."""
_num_joins: Counter[str] = Counter()
"""By the name of a group: a group that is destroyed and made again has the same name and the same store."""
_joined: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Process group -> why its GPUs share no memory, "" where they do."""
_workspaces: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
"""Process group -> the memory that they share; of all programs, as calls of a group come one after the other."""


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call, or None; joins the GPUs of the group.

    call: as it stands in the graph.
    """
    x = call.args["x"]
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, and the kernel sums {', '.join(map(str, _DTYPES))}"
    return join(call.args["group"]) or None


@kernel_of(ALL_REDUCE)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum by the kernel what is small enough, and by NCCL what is not."""
    found = shared_group(group)
    if found is not None and found not in _joined:
        join(group)  # a process that reads its graphs from the compile cache has asked no condition
    workspace = None if found is None else _workspaces.get(found)
    num_bytes = x.numel() * x.element_size()
    if workspace is None or not 0 < num_bytes <= workspace.numel() or num_bytes % _ALIGNMENT:
        return ALL_REDUCE.reference(x, group)  # type: ignore[no-any-return]
    shared = workspace[:num_bytes].view(x.dtype).view(x.shape)
    out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x.contiguous(), "sum", found.group_name)
    return out


def join(group: str) -> str:
    """Join the GPUs of a group, which wait for this, and return why not; "" where they share memory.

    Asked again, it gives the same answer at once. All processes of the group must ask.
    """
    found = shared_group(group)
    if found is None:
        return "nobody shares the group"
    if found not in _joined:
        _joined[found] = _join(found)
    return _joined[found]


def _join(found: Any) -> str:
    reason = _first(_told(found, _why_apart(found)))
    if not reason:
        own, memory = "", None
        try:
            memory = _workspace(found)
        except Exception as error:  # a container may not let processes map each other's memory
            own = f"{type(error).__name__}: {error}"
        reason = _first(_told(found, own))
        if not reason and memory is not None:
            _workspaces[found] = memory
    if reason:
        log.info("collectives of group %r go by NCCL: %s", found.group_name, reason)
    return reason


def _first(reasons: list[str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


def _told(found: Any, own: str) -> list[str]:
    """Tell all processes of the group a text, and return those of all.

    Through the group's store: one may come from the condition, another, with graphs from the compile cache, from its
    first run, and collectives have to be in one order.
    """
    _num_joins[found.group_name] += 1
    prefix = f"core_cuda/{_num_joins[found.group_name]}"
    # Listed in no stub of torch's.
    store: Any = distributed.PrefixStore(prefix, found.get_group_store())  # type: ignore[attr-defined]
    store.set(str(found.rank()), f"!{own}")  # a store may know no empty text
    names = [str(rank) for rank in range(found.size())]
    try:
        store.wait(names)  # as long as the group's timeout
    except RuntimeError:
        raise LoweringError(
            f"joining the memory of GPUs in group {found.group_name!r}, as rank {found.rank()} of {found.size()}",
            found=f"not all ranks did so within {store.timeout.total_seconds():.0f} s",
            remedy="have all processes of a group compile and run the same, and look whether they all still run",
        ) from None
    return [bytes(store.get(name)).decode()[1:] for name in names]


def _why_apart(found: Any) -> str:
    """Return why this process's GPU can't read the memory of all others, as far as it can tell."""
    if found.size() not in MOST_BYTES:
        return f"the kernel was measured for {', '.join(map(str, MOST_BYTES))} GPUs, and the group has {found.size()}"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local < found.size():
        return f"{local or 'an unknown number of'} ranks are on this host, and the group has {found.size()}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} has no symm_mem::one_shot_all_reduce_copy"
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    apart = [other for other in range(count) if other != own and not torch.cuda.can_device_access_peer(own, other)]
    return f"GPU {own} can't reach the memory of GPU {apart[0]}" if apart else ""


def _workspace(found: Any) -> Tensor:
    """Return memory that all GPUs of the group map; all of its processes call this."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    memory: Tensor = symmetric.empty(MOST_BYTES[found.size()], dtype=torch.uint8, device=device)
    symmetric.rendezvous(memory, found.group_name)
    return memory


IMPLEMENTATIONS = (
    OpImplementation(op=ALL_REDUCE.qualified_name, name="cuda_all_reduce", fn=all_reduce, condition=why_not),
)
