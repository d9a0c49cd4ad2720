"""Memory through which the GPUs of a host hand parts of tensors to each other, of each program for itself.

A captured graph holds the addresses of what it copies from and to. So memory belongs to the stream on which a program
captures: warm-up runs make it, as much as the largest of the program's calls needs, all graphs of the program share it,
and it goes when the program closes. What runs outside of graphs has that of its own stream, for as long as the group.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from core.common.ops.collective.collectives import shared_group
from core.errors import CaptureError

log = logging.getLogger("core.cuda")
LEAST_BYTES = 2**21
"""Of memory that is made: GPUs map it in pages of this size."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """The memory of a group's GPUs, as one of its processes sees it."""

    rank: int
    #: of each GPU, by rank, as this process maps it: uint8, equally long
    memories: tuple[Tensor, ...]
    #: makes the current stream wait until the streams of all GPUs of the group have come as far
    barrier: Callable[[], None]

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return len(self.memories)

    @property
    def num_bytes(self) -> int:
        """Of this GPU's memory."""
        return self.memories[self.rank].numel()

    def area(self, rank: int, shape: Sequence[int], dtype: torch.dtype, *, index: int = 0) -> Tensor:
        """Return a tensor in the memory of a GPU, behind `index` of the same shape and dtype."""
        num_bytes = prod(shape) * dtype.itemsize
        return self.memories[rank][index * num_bytes :][:num_bytes].view(dtype).view(*shape)


_held: weakref.WeakKeyDictionary[Any, dict[int, list[Exchange]]] = weakref.WeakKeyDictionary()
"""By process group and stream, the largest last: captured graphs hold addresses in the smaller ones too."""


def exchange(group: str, num_bytes: int) -> Exchange | None:
    """Return memory of the current stream with at least so many bytes on each GPU; None where GPUs share none.

    All processes of the group must ask, in the same order and for as much. Raises `CaptureError` where it has to be
    made while the stream is captured.
    """
    from core_cuda.symmetric import apart  # imports Triton, without which there are no such calls

    found = shared_group(group)
    if found is None or apart(group):
        return None
    held = _held.setdefault(found, {}).setdefault(torch.cuda.current_stream().cuda_stream, [])
    if not held or held[-1].num_bytes < num_bytes:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{num_bytes} bytes through which the GPUs of group {found.group_name!r} hand parts to each other",
                found=f"{held[-1].num_bytes if held else 0} of this stream, which is being captured",
                remedy="run the same call once on this stream before the capture",
            )
        held.append(_made(found, num_bytes))
    return held[-1]


def _made(found: Any, num_bytes: int) -> Exchange:
    from core_cuda.symmetric import allocate, mapped

    # Powers of two: what is kept because it was too small is never more than what is used.
    mine = allocate(max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))
    handle, size = mapped(mine, found), found.size()
    rank, name = found.rank(), found.group_name
    log.info("group %r hands parts over in %d MiB on each of %d GPUs", name, mine.numel() >> 20, size)
    others = (handle.get_buffer(each, (mine.numel(),), torch.uint8) for each in range(size))
    memories = tuple(mine if each == rank else other for each, other in enumerate(others))
    return Exchange(rank=rank, memories=memories, barrier=handle.barrier)


def release(stream: int) -> int:
    """Let go of the memory of a stream, whose graphs are gone, and return of how many bytes.

    stream: as `torch.cuda.Stream.cuda_stream` has it. A GPU that still reads what this one gave it has it mapped for
    itself, so the processes of a group need not wait for each other.
    """
    dropped = [each for streams in _held.values() for each in streams.pop(stream, [])]
    return sum(each.num_bytes for each in dropped)


def held_bytes() -> int:
    """Return the bytes of this GPU that are held for handing parts over, by all programs together."""
    return sum(each.num_bytes for streams in _held.values() for held in streams.values() for each in held)
