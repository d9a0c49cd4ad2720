"""Memory layout: the tensors in a value, the storage of each, and how a tensor lies in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.passes.values.sizes import same_size


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested tuples and lists; a dict or a slice is a leaf."""
    if not isinstance(value, (tuple, list)):
        return [value]
    leaves: list[Any] = []
    for item in value:
        leaves += flat(item) if isinstance(item, (tuple, list)) else (item,)
    return leaves


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples and lists."""
    return [leaf for leaf in flat(value) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    """Return a key that is equal for tensors in one storage."""
    return int(tensor.untyped_storage()._cdata)


def in_order(tensor: Tensor) -> bool:
    """Tell whether a tensor is contiguous, without a condition on its symbolic sizes; False where that needs one."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not ((type(size) is int and size == 1) or same_size(stride, expected)):
            return False
        expected = expected * size
    return True


def same_strides(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors of one shape have the same strides; the stride of a dimension of size 1 does not
    count."""
    sizes = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all((type(size) is int and size == 1) or same_size(mine, theirs) for size, mine, theirs in sizes)


def same_layout(left: Any, right: Any, *, strides: bool = True) -> bool:
    """Tell whether two tensors have one dtype, device and shape, and (strides) lie alike in their memory."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.layout != right.layout:
        return False
    if left.layout != torch.strided or left.dtype != right.dtype or left.device != right.device:
        return False
    if left.dim() != right.dim() or not all(map(same_size, left.shape, right.shape)):
        return False
    return not strides or same_strides(left, right)
