"""Tensors that do not own their memory, by which captured outputs are held so that graphs of a pool can share memory.

What a graph allocates lives in the graph's pool. A Python reference to such a tensor keeps the pool from giving its
memory to the next capture. After the capture only the address, shape and strides are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MAKERS: dict[torch.device, Callable[[Tensor], Tensor]] = {}


def weak_by(device: torch.device, make: Callable[[Tensor], Tensor]) -> None:
    """Register `make` as the maker of weak tensors on a device (index included).

    For devices whose kernels need storages of a class of their own, where torch's plain storage over an address fails.
    """
    _MAKERS[device] = make


def weak_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory, dtype, shape and strides that does not keep the memory alive.

    The caller sees to it that the memory outlives the result: reading it later than that is undefined.
    """
    make = _MAKERS.get(tensor.device)
    if make is not None:
        return make(tensor)
    storage = tensor.untyped_storage()
    return _over(
        torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes()), tensor
    )


@dataclass(frozen=True, slots=True)
class Loose:
    """A tensor to which core gave up its reference. `settle` asks later whether somebody else still holds the
    memory."""

    #: a weak stand-in; the tensor itself where its memory can lie in no graph's pool
    tensor: Tensor
    #: a weak reference to the storage; None if `tensor` is the tensor itself
    reference: StorageWeakRef | None

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> Loose:
        """Give up the reference to a tensor. device: where the graphs run, index included; tensors elsewhere (on the
        host) are kept."""
        # Memory alone does not tell what a conjugated view or a tensor subclass means.
        if not _is_plain(tensor) or tensor.device != device:
            return cls(tensor, None)
        return cls(weak_tensor(tensor), StorageWeakRef(tensor.untyped_storage()))

    def settle(self) -> Tensor:
        """Return a tensor that holds the memory if anybody still does, and a weak one otherwise.

        Memory that somebody holds (weights, static inputs, a cache) must outlive its owner, as a captured graph has its
        address. Memory that nobody holds belongs to a graph's pool, by the contract of `SegmentBackend.segment`.
        """
        if self.reference is None:
            return self.tensor
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return self.tensor if storage is None else _over(storage, self.tensor)


def release(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Empty the list and return stand-ins for its tensors, weak where nobody else holds the memory.

    The caller must hold no other reference to the tensors. See `Loose`.
    """
    loose = [Loose.of(tensor, device) for tensor in tensors]
    tensors.clear()
    return [each.settle() for each in loose]


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_conj() and not tensor.is_neg()


def _over(storage: Any, like: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(
            storage, like.storage_offset(), like.shape, like.stride()
        )


def addresses(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the addresses of the storages of these tensors, those that `has_address`."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if has_address(tensor))


def has_address(tensor: Tensor) -> bool:
    """Return whether a tensor lies in one storage: it is neither sparse nor a subclass that wraps others."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def overlaps(values: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return each pair of tensors among the values that share memory: both indices, and the distance of their starts in
    bytes."""
    spans = []
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and has_address(value) and value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            spans.append((value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size(), index))
    return [
        (index, other, start - begin)
        for position, (begin, end, other) in enumerate(spans)
        for start, stop, index in spans[position + 1 :]
        if start < end and begin < stop
    ]
