"""The part of a parameter that a process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.common.ops.collective.collectives import shared_group


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a parameter is divided among processes."""

    #: The dimension that is cut; None: the first process holds the parameter, the others zeros.
    dim: int | None
    #: Equal blocks along that dimension, of each of which a process holds a part: 2 for gate and up in one weight.
    blocks: int = 1
    #: Neighbouring processes that hold the same part: key heads, where there are fewer of them than processes.
    copies: int = 1

    def divides(self, size: int, count: int) -> bool:
        """Tell whether `count` processes get equal parts of a dimension of this size."""
        if self.dim is None:
            return True
        return count % self.copies == 0 and size % (self.blocks * count // self.copies) == 0

    def shape(self, whole: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the shape of a part."""
        if self.dim is None:
            return whole
        return (*whole[: self.dim], whole[self.dim] // (count // self.copies), *whole[self.dim + 1 :])

    def read(self, whole: Any, sizes: tuple[int, ...], rank: int, count: int) -> Tensor:
        """Return the part of process `rank` of `count`.

        whole: a tensor of these sizes, or a slice of safetensors, of which nothing else is read.
        """
        if self.dim is None:
            found: Tensor = whole[:]
            return found if rank == 0 else torch.zeros_like(found)
        block = sizes[self.dim] // self.blocks
        share = block // (count // self.copies)
        before = (slice(None),) * self.dim
        starts = [index * block + rank // self.copies * share for index in range(self.blocks)]
        parts = [whole[(*before, slice(start, start + share))] for start in starts]
        return parts[0] if len(parts) == 1 else _joined(parts, self.dim)

    def of(self, whole: Tensor, rank: int, count: int) -> Tensor:
        """Return the part of a tensor in memory of its own."""
        return self.read(whole, tuple(whole.shape), rank, count).clone(memory_format=torch.contiguous_format)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(parts, dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(dtype)  # not every op takes fp8


def rank_in(group: str) -> int:
    """Return this process's number in a group that a collective names; 0 where no process group is initialised."""
    found = shared_group(group)
    return 0 if found is None else int(found.rank())
