"""Tensors without ownership: they keep an address and a shape, and leave the memory to whoever owns it.

What a graph allocates lives in the graph's pool. A Python reference to such a tensor keeps the pool from giving its
memory to the next capture, so what must be known of it after the capture is its address alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["release", "weak_tensor"]


def weak_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory, dtype, shape and strides that does not keep the memory alive.

    The caller sees to it that the memory outlives the result: reading it later than that is undefined.
    """
    storage = tensor.untyped_storage()
    return _over(
        torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes()), tensor
    )


def release(tensors: list[Tensor]) -> list[Tensor]:
    """Empty the list and return stand-ins for its tensors, weak where nobody else holds the memory.

    Memory that somebody else holds (weights, static inputs, a cache) is held by its stand-in too: a captured graph has
    its address, so it must outlive its owner. Memory that nobody holds belongs to a graph's pool, by the contract of
    `SegmentBackend.segment`. The caller must hold no other reference to the tensors.
    """
    # Memory alone does not tell what a conjugated view or a tensor subclass means.
    loose = [weak_tensor(tensor) if _is_plain(tensor) else tensor for tensor in tensors]
    references = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    tensors.clear()
    return [_hold(reference, tensor) for reference, tensor in zip(references, loose, strict=True)]


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_conj() and not tensor.is_neg()


def _hold(reference: StorageWeakRef, tensor: Tensor) -> Tensor:
    if not _is_plain(tensor):
        return tensor
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return tensor if storage is None else _over(storage, tensor)


def _over(storage: Any, like: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(
            storage, like.storage_offset(), like.shape, like.stride()
        )


def addresses(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the addresses of the storages of these tensors."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
