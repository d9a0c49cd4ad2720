"""Memory that the GPUs of a host share, and how the processes of a group join it (torch's symmetric memory).

A GPU reads and writes the memory of others over NVLink. NVLink's multicast is never used.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.ops.collective.collectives import shared_group
from core.common.telling import tell
from core_cuda.ops import launching

log = logging.getLogger("core.cuda")

AREA_BYTES: Mapping[int, int] = MappingProxyType({2: 2**16, 4: 2**15, 8: 2**14})
"""By the number of GPUs, what a program can be sent by each of them in one sum; so each GPU gives 33 MiB."""
HALVES = 2
"""Sums are sent to one half and the other in turns."""
EMPTY = 0xFF
"""Every byte of an element that was not sent yet: a NaN in each dtype."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_apart: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Process group -> why its GPUs don't reach each other's memory, "" where they do."""
_joined: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Process group -> why its GPUs share no memory for sums, "" where they do."""
_shared: weakref.WeakKeyDictionary[Any, Shared] = weakref.WeakKeyDictionary()
"""Process group -> the memory that they share; of all programs, as calls of a group come one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shared:
    """The memory of a group as one of its GPUs sees it: areas [`HALVES`, GPU that sends, program, bytes]."""

    rank: int
    size: int
    #: programs of a kernel at most, one to a multiprocessor, so that all run at once: they wait for each other
    num_programs: int
    area_bytes: int
    #: this GPU's areas, uint8; `EMPTY` wherever nothing was sent that is still to be read
    mine: Tensor
    #: where the areas of each GPU, by rank, lie in this process's address space
    places: tuple[int, ...]
    #: keeps them mapped
    handle: Any
    #: (num_programs,) int32: the half that the next sum of a program is sent to
    turns: Tensor


def shared_memory(group: str) -> Shared | None:
    """Return the memory of a group's GPUs, None where they share none; joins them if nobody has asked yet.

    All processes of the group must ask, also one that reads its graphs from the compile cache.
    """
    found = shared_group(group)
    if found is None:
        return None
    if found not in _joined:
        join(group)
    return _shared.get(found)


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


def apart(group: str) -> str:
    """Return why the GPUs of a group don't reach each other's memory, "" where they do.

    Asked first, it waits for all processes of the group, which must ask too; later it gives the same answer at once.
    """
    found = shared_group(group)
    if found is None:
        return "nobody shares the group"
    if found not in _apart:
        reason = _elsewhere(_told(found, _place())) or _first(_told(found, _why_apart()))
        if reason:
            log.info("collectives of group %r go by NCCL: %s", found.group_name, reason)
        _apart[found] = reason
    return _apart[found]


def _join(found: Any) -> str:
    if found.size() not in AREA_BYTES:
        return f"the kernel is for {', '.join(map(str, AREA_BYTES))} GPUs, and the group has {found.size()}"
    reason = apart(found.group_name)
    if not reason:
        own, shared = "", None
        try:
            shared = _share(found)
        except Exception as error:  # a container may not let processes map each other's memory
            own = f"{type(error).__name__}: {error}"
        reason = _first(_told(found, own))
        if not reason and shared is not None:
            _shared[found] = shared
        elif reason:
            log.info("sums of group %r go by NCCL: %s", found.group_name, reason)
    return reason


def _first(reasons: list[str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


def _place() -> str:
    """Return what the processes of a group must have in common: the host, since when it runs, and the kind of GPU."""
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "boot unknown"
    gpu = f"{torch.cuda.get_device_name()} with {launching.num_multiprocessors()} multiprocessors"
    return f"{socket.gethostname()} ({boot}), {gpu}"


def _elsewhere(places: list[str]) -> str:
    """Return which rank is not where rank 0 is, or ""."""
    others = (f"rank {rank} is on {place}, rank 0 on {places[0]}" for rank, place in enumerate(places))
    return next((text for text, place in zip(others, places, strict=True) if place != places[0]), "")


def _told(found: Any, own: str) -> list[str]:
    # One may come from the condition, another, with graphs from the compile cache, from its first run.
    return tell(found, "core_cuda", "joining the memory of GPUs in group", own)


def _why_apart() -> str:
    """Return why this process's GPU can't write to the memory of all others, as far as it can tell."""
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    apart = [other for other in range(count) if other != own and not torch.cuda.can_device_access_peer(own, other)]
    return f"GPU {own} can't reach the memory of GPU {apart[0]}" if apart else ""


def _share(found: Any) -> Shared:
    """Return memory that all GPUs of the group map, empty; all of its processes call this, and then tell."""
    size, num_programs = found.size(), launching.num_multiprocessors()
    mine = allocate(HALVES * size * num_programs * AREA_BYTES[size])
    mine.fill_(EMPTY)
    turns = torch.zeros(num_programs, dtype=torch.int32, device=mine.device)
    handle = mapped(mine, found)
    torch.cuda.synchronize(mine.device)  # before the others are told, and send
    return Shared(
        rank=found.rank(),
        size=size,
        num_programs=num_programs,
        area_bytes=AREA_BYTES[size],
        mine=mine,
        places=tuple(handle.buffer_ptrs),
        handle=handle,
        turns=turns,
    )


def allocate(num_bytes: int) -> Tensor:
    """Return memory of this GPU, uint8, that others can map; the caller holds it. Not from within a capture."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch._C._distributed_c10d import _SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    # torch's `empty` may put several allocations into one segment, with one set of signals for all.
    found: Tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    return found


def mapped(mine: Tensor, found: Any) -> Any:
    """Return torch's handle of what the processes of a group have allocated, as much each; all of them must call."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.rendezvous(mine, found.group_name)
