"""Kernels that read or write where indices say: gather, scatter, selection, embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.marshal import kernel

_REDUCTIONS = {1: "sum", 2: "prod", 3: "amax", 4: "amin"}


@kernel("aclnnEmbedding", "TTT")
def _embedding(weight: Tensor, indices: Tensor, out: Tensor) -> None:
    out.copy_(torch.nn.functional.embedding(indices.long(), weight))


@kernel("aclnnIndexSelect", "TITT")
def _index_select(x: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    out.copy_(x.index_select(dim, index.long()))


@kernel("aclnnGather", "TITT")
def _gather(x: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    out.copy_(x.gather(dim, index.long()))


@kernel("aclnnTake", "TTT")
def _take(x: Tensor, index: Tensor, out: Tensor) -> None:
    out.copy_(x.take(index.long()))


def _position(index: Tensor | None) -> Any:
    # torch_npu stands an empty tensor for a dimension that is not indexed.
    if index is None or (index.numel() == 0 and index.dim() == 1):
        return slice(None)
    return index if index.dtype in (torch.bool, torch.uint8) else index.long()


def _positions(indices: list[Tensor | None]) -> tuple[Any, ...]:
    return tuple(_position(index) for index in indices)


@kernel("aclnnIndex", "TLT")
def _index(x: Tensor, indices: list[Tensor | None], out: Tensor) -> None:
    if out.numel():
        out.copy_(x[_positions(indices)])


@kernel("aclnnIndexPutImpl", "TLTbb")
def _index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool, unsafe: bool) -> None:
    if not values.numel():
        return
    places = [None if isinstance(position, slice) else position for position in _positions(indices)]
    torch.ops.aten.index_put_(x, places, values, accumulate)


@kernel("aclnnIndexAdd", "TITTST")
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any, out: Tensor) -> None:
    out.copy_(x.index_add(dim, index.long(), source, alpha=alpha))


@kernel("aclnnIndexCopy", "TITTT")
def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor, out: Tensor) -> None:
    out.copy_(x.index_copy(dim, index.long(), source))


@kernel("aclnnInplaceIndexCopy", "TITT")
def _index_copy_in_place(x: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    x.index_copy_(dim, index.long(), source)


@kernel("aclnnIndexFill", "TITST")
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any, out: Tensor) -> None:
    out.copy_(x.index_fill(dim, index.long(), value))


@kernel("aclnnInplaceIndexFill", "TITS")
def _index_fill_in_place(x: Tensor, dim: int, index: Tensor, value: Any) -> None:
    x.index_fill_(dim, index.long(), value)


@kernel("aclnnInplaceIndexFillTensor", "TIAS")
def _index_fill_list(x: Tensor, dim: int, index: list[int], value: Any) -> None:
    x.index_fill_(dim, torch.tensor(index), value)


def _scattered(x: Tensor, dim: int, index: Tensor, source: Any, reduction: int) -> Tensor:
    if isinstance(source, Tensor):
        source = source.to(x.dtype)
    if reduction == 0:
        return x.scatter(dim, index.long(), source)
    if not isinstance(source, Tensor):
        source = torch.full(index.shape, source, dtype=x.dtype)
    return x.scatter_reduce(dim, index.long(), source, _REDUCTIONS[reduction])


@kernel("aclnnScatter", "TITTIT")
def _scatter(x: Tensor, dim: int, index: Tensor, source: Tensor, reduction: int, out: Tensor) -> None:
    out.copy_(_scattered(x, dim, index, source, reduction))


@kernel("aclnnScatterValue", "TITSIT")
def _scatter_value(x: Tensor, dim: int, index: Tensor, value: Any, reduction: int, out: Tensor) -> None:
    out.copy_(_scattered(x, dim, index, value, reduction))


@kernel("aclnnInplaceScatter", "TITTI")
def _scatter_in_place(x: Tensor, dim: int, index: Tensor, source: Tensor, reduction: int) -> None:
    x.copy_(_scattered(x, dim, index, source, reduction))


@kernel("aclnnInplaceScatterValue", "TITSI")
def _scatter_value_in_place(x: Tensor, dim: int, index: Tensor, value: Any, reduction: int) -> None:
    x.copy_(_scattered(x, dim, index, value, reduction))


@kernel("aclnnScatterAdd", "TITTT")
def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor, out: Tensor) -> None:
    out.copy_(x.scatter_add(dim, index.long(), source))


@kernel("aclnnScatterNdUpdate", "TTT")
def _scatter_nd_update(x: Tensor, indices: Tensor, updates: Tensor) -> None:
    x[tuple(indices.long().unbind(-1))] = updates


def fill_front(out: Tensor, found: Tensor) -> list[int]:
    """Write `found` to the beginning of the memory of `out`, which has room for any result, and return its shape."""
    out.as_strided(found.shape, found.contiguous().stride()).copy_(found)
    return list(found.shape)


@kernel("aclnnMaskedSelect", "TTT")
def _masked_select(x: Tensor, mask: Tensor, out: Tensor) -> dict[int, list[int]]:
    return {2: fill_front(out, x.masked_select(mask.bool()))}


@kernel("aclnnNonzero", "TT")
def _nonzero(x: Tensor, out: Tensor) -> dict[int, list[int]]:
    return {1: fill_front(out, x.nonzero())}


@kernel("aclnnNonzeroV2", "TT")
def _nonzero_by_dim(x: Tensor, out: Tensor) -> dict[int, list[int]]:
    return {1: fill_front(out, x.nonzero().t())}


@kernel("aclnnUnique", "TbbTT")
def _unique(x: Tensor, ordered: bool, inverse: bool, out: Tensor, places: Tensor) -> dict[int, list[int]]:
    values, found = torch.unique(x, return_inverse=True)
    if inverse:
        places.copy_(found)
    return {3: fill_front(out, values)}


@kernel("aclnnUnique2", "TbbbTTT")
def _unique_counted(
    x: Tensor, ordered: bool, inverse: bool, counted: bool, out: Tensor, places: Tensor, counts: Tensor
) -> dict[int, list[int]]:
    values, found, numbers = torch.unique(x, return_inverse=True, return_counts=True)
    if inverse:
        places.copy_(found)
    shapes = {4: fill_front(out, values)}
    if counted:
        shapes[6] = fill_front(counts, numbers)
    return shapes


@kernel("aclnnUniqueConsecutive", "TbbITTT")
def _unique_consecutive(
    x: Tensor, inverse: bool, counted: bool, dim: int, out: Tensor, places: Tensor, counts: Tensor
) -> dict[int, list[int]]:
    flat = dim >= 1000  # torch_npu's sign for "no dimension"
    values, found, numbers = torch.unique_consecutive(x, True, True, None if flat else dim)
    if inverse:
        places.copy_(found)
    shapes = {4: fill_front(out, values)}
    if counted:
        shapes[6] = fill_front(counts, numbers)
    return shapes


@kernel("aclnnInplaceMaskedScatter", "TTT")
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> None:
    x.masked_scatter_(mask.bool(), source)


@kernel("aclnnOneHot", "TITTIT")
def _one_hot(x: Tensor, depth: int, on: Tensor, off: Tensor, dim: int, out: Tensor) -> None:
    hot = torch.nn.functional.one_hot(x.long(), depth).bool()
    if dim != -1 and dim != x.dim():
        hot = hot.movedim(-1, dim)
    out.copy_(torch.where(hot, on.to(out.dtype).reshape(()), off.to(out.dtype).reshape(())))


@kernel("aclnnSearchSorted", "TTbbTT")
def _search_sorted(
    sequence: Tensor, values: Tensor, narrow: bool, right: bool, sorter: Tensor | None, out: Tensor
) -> None:
    out.copy_(torch.searchsorted(sequence, values, right=right, sorter=sorter))
