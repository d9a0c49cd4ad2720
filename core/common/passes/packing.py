"""Lays weights end to end in one tensor and makes them views of it: state_dict, reload and ties keep working.

A weight keeps its identity and its values; only its address changes. Weights that lie end to end already are left where
they are, so that a second graph of the same model binds the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

from core.common.passes.values.layouts import memory


@dataclass(frozen=True, slots=True)
class Packing:
    """Tensors to lay end to end along dimension 0. parts: None stands for zeros. sizes: rows of each part."""

    parts: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]

    @property
    def present(self) -> tuple[Tensor, ...]:
        """The parts that are tensors; at least one."""
        return tuple(part for part in self.parts if part is not None)

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.present[0].shape[1:])

    def packed(self) -> Tensor | None:
        """Return the joined tensor if the parts already lie end to end in one storage, with zeros in the gaps; else
        None."""
        first = self.present[0]
        if any(memory(part) != memory(first) or not part.is_contiguous() for part in self.present):
            return None
        width = prod(self.row)
        starts = _starts(self.sizes)
        offsets = {
            part.storage_offset() - start * width
            for part, start in zip(self.parts, starts, strict=True)
            if part is not None
        }
        begin, count = offsets.pop(), sum(self.sizes) * width
        if offsets or begin < 0 or (begin + count) * first.element_size() > first.untyped_storage().nbytes():
            return None
        whole = first.detach().as_strided((count,), (1,), begin).view(-1, *self.row)
        spans = zip(self.parts, starts, self.sizes, strict=True)
        gaps = [whole[start : start + size] for part, start, size in spans if part is None]
        return None if any(bool(gap.any()) for gap in gaps) else whole

    def pack(self) -> Tensor:
        """Return the joined tensor, of which the parts are views from now on; their old memory is freed."""
        known = self.packed()
        if known is not None:
            return known
        first = self.present[0]
        with torch.no_grad():
            pieces = [
                first.new_zeros((size, *self.row)) if part is None else part.detach()
                for part, size in zip(self.parts, self.sizes, strict=True)
            ]
            whole = torch.cat(pieces)
            for part, start, size in zip(self.parts, _starts(self.sizes), self.sizes, strict=True):
                if part is not None:
                    part.data = whole[start : start + size]
        return whole


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


class Owners:
    """Which constants share a storage: memory that other objects refer to must stay where it is."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._count = Counter(memory(tensor) for tensor in tensors if _is_plain(tensor))

    def refusal(self, packing: Packing) -> str:
        """Return why the parts can't be laid end to end, or ""."""
        kinds = {(part.dtype, part.device, tuple(part.shape[1:])) for part in packing.present}
        if len(kinds) > 1:
            return "they differ in dtype, device or row: " + ", ".join(sorted(map(str, kinds)))
        for part in packing.present:
            reason = _unfit(part)
            if reason:
                return reason
        if packing.packed() is not None:
            return ""
        for part in packing.present:
            if part.untyped_storage().nbytes() != part.nbytes:
                return "one is part of a larger tensor that is laid out otherwise"
            # One reference from the tensor and one from the storage object used to ask.
            uses = torch._C._storage_Use_Count(memory(part))
            if self._count[memory(part)] > 1 or uses > 2:
                return "one shares its memory with another tensor, which would keep the old memory"
        return ""


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided


def _unfit(tensor: Tensor) -> str:
    if not _is_plain(tensor) or tensor.is_quantized:
        return f"one is a {type(tensor).__name__} of layout {tensor.layout}, not a plain tensor"
    if not tensor.is_contiguous():
        return "one is not contiguous"
    # On some devices this holds for every tensor and then says nothing.
    if tensor.is_shared() and not torch.empty(1, device=tensor.device).is_shared():
        return "one lies in memory that it shares with other processes"
    if tensor.requires_grad and torch.is_grad_enabled():
        return "one requires a gradient, and gradients are enabled"
    return "one is no leaf of autograd" if not tensor.is_leaf else ""
