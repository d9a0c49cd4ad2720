"""Kernels that read or write where indices say: gather, scatter, selection, embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.formulas import both, in_place, stored
from simulator.marshal import kernel

_REDUCTIONS = {1: "sum", 2: "prod", 3: "amax", 4: "amin"}


def _position(index: Tensor | None) -> Any:
    # torch_npu stands an empty tensor for a dimension that is not indexed.
    if index is None or (index.numel() == 0 and index.dim() == 1):
        return slice(None)
    return index if index.dtype in (torch.bool, torch.uint8) else index.long()


@kernel("aclnnIndex", "TLT")
def _index(x: Tensor, indices: list[Tensor | None], out: Tensor) -> None:
    if out.numel():
        out.copy_(x[tuple(map(_position, indices))])


@kernel("aclnnIndexPutImpl", "TLTbb")
def _index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool, unsafe: bool) -> None:
    if not values.numel():
        return
    places = [None if isinstance(position, slice) else position for position in map(_position, indices)]
    torch.ops.aten.index_put_(x, places, values, accumulate)


def _scattered(x: Tensor, dim: int, index: Tensor, source: Any, reduction: int) -> Tensor:
    if isinstance(source, Tensor):
        source = source.to(x.dtype)
    if reduction == 0:
        return x.scatter(dim, index.long(), source)
    if not isinstance(source, Tensor):
        source = torch.full(index.shape, source, dtype=x.dtype)
    return x.scatter_reduce(dim, index.long(), source, _REDUCTIONS[reduction])


both(
    {
        "IndexCopy": ("TITTT", lambda x, dim, index, source: x.index_copy(dim, index.long(), source)),
        "IndexFill": ("TITST", lambda x, dim, index, value: x.index_fill(dim, index.long(), value)),
        "Scatter": ("TITTIT", _scattered),
        "ScatterValue": ("TITSIT", _scattered),
    }
)
stored(
    {
        "Embedding": ("TTT", lambda weight, indices: torch.nn.functional.embedding(indices.long(), weight)),
        "IndexSelect": ("TITT", lambda x, dim, index: x.index_select(dim, index.long())),
        "Gather": ("TITT", lambda x, dim, index: x.gather(dim, index.long())),
        "Take": ("TTT", lambda x, index: x.take(index.long())),
        "IndexAdd": (
            "TITTST",
            lambda x, dim, index, source, alpha: x.index_add(dim, index.long(), source, alpha=alpha),
        ),
        "ScatterAdd": ("TITTT", lambda x, dim, index, source: x.scatter_add(dim, index.long(), source)),
        "SearchSorted": (
            "TTbbTT",
            lambda sequence, values, _, right, sorter: torch.searchsorted(sequence, values, right=right, sorter=sorter),
        ),
    }
)
in_place(
    {
        "IndexFillTensor": ("TIAS", lambda x, dim, index, value: x.index_fill(dim, torch.tensor(index), value)),
        "MaskedScatter": ("TTT", lambda x, mask, source: x.masked_scatter(mask.bool(), source)),
    }
)


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


def _unique(
    found: tuple[Tensor, ...], inverse: bool, counted: bool, out: Tensor, places: Tensor, counts: Tensor
) -> dict[int, list[int]]:
    """Write values, where each element's stands among them, and how often it occurs; return the sizes found."""
    values, inverses, numbers = found
    if inverse:
        places.copy_(inverses)
    shapes = {4: fill_front(out, values)}
    return {**shapes, 6: fill_front(counts, numbers)} if counted else shapes


@kernel("aclnnUnique", "TbbTT")
def _unique_values(x: Tensor, ordered: bool, inverse: bool, out: Tensor, places: Tensor) -> dict[int, list[int]]:
    found = torch.unique(x, return_inverse=True, return_counts=True)
    return {3: _unique(found, inverse, False, out, places, out)[4]}


@kernel("aclnnUnique2", "TbbbTTT")
def _unique_counted(x: Tensor, ordered: bool, inverse: bool, counted: bool, *outs: Tensor) -> dict[int, list[int]]:
    return _unique(torch.unique(x, return_inverse=True, return_counts=True), inverse, counted, *outs)


@kernel("aclnnUniqueConsecutive", "TbbITTT")
def _unique_consecutive(x: Tensor, inverse: bool, counted: bool, dim: int, *outs: Tensor) -> dict[int, list[int]]:
    flat = dim >= 1000  # torch_npu's sign for "no dimension"
    return _unique(torch.unique_consecutive(x, True, True, None if flat else dim), inverse, counted, *outs)


@kernel("aclnnOneHot", "TITTIT")
def _one_hot(x: Tensor, depth: int, on: Tensor, off: Tensor, dim: int, out: Tensor) -> None:
    hot = torch.nn.functional.one_hot(x.long(), depth).bool()
    if dim != -1 and dim != x.dim():
        hot = hot.movedim(-1, dim)
    out.copy_(torch.where(hot, on.to(out.dtype).reshape(()), off.to(out.dtype).reshape(())))
