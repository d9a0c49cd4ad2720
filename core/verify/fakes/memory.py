"""Which tensors share memory, and whether memory holds the same bits as before."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype hold the same bits, those of NaN included."""
    a, b = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(a, b))


def memory(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have a byte in common."""
    if memory(one) != memory(other) or not one.numel() or not other.numel():
        return False
    # Not torch.isin, which sorts as many numbers as both have bytes.
    own, others = _offsets(one), _offsets(other)
    first, last = own.min(), own.max()
    taken = torch.zeros(int(last - first) + 1, dtype=torch.bool)
    taken[own - first] = True
    near = others[(others >= first) & (others <= last)]
    return bool(taken[near - first].any())


def whole(tensor: Tensor) -> Tensor:
    """Return all of the storage that a tensor lies in, as one row of its dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def _offsets(tensor: Tensor) -> Tensor:
    """Return which bytes of its storage a tensor occupies."""
    size = tensor.element_size()
    count = tensor.untyped_storage().nbytes() // size
    elements = torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return (elements.reshape(-1, 1) * size + torch.arange(size)).flatten()
