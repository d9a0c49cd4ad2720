"""Kernels that reduce or scan a dimension: sums, extremes, sorting, softmax, statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.marshal import kernel


@kernel("aclnnReduceSum", "TAbiT")
def _sum(x: Tensor, dims: list[int], keep: bool, dtype: int, out: Tensor) -> None:
    out.copy_(x.sum(dims or None, keepdim=keep, dtype=out.dtype).view(out.shape))


@kernel("aclnnMean", "TAbiT")
def _mean(x: Tensor, dims: list[int], keep: bool, dtype: int, out: Tensor) -> None:
    # In float32 for the narrow types, as on the device and in torch's own reduction.
    out.copy_(x.mean(dims or None, keepdim=keep, dtype=out.dtype).view(out.shape))


@kernel("aclnnMax", "TT")
def _max(x: Tensor, out: Tensor) -> None:
    out.copy_(x.max())


@kernel("aclnnMin", "TT")
def _min(x: Tensor, out: Tensor) -> None:
    out.copy_(x.min())


@kernel("aclnnMaxDim", "TIbTT")
def _max_along(x: Tensor, dim: int, keep: bool, values: Tensor, indices: Tensor) -> None:
    found = x.max(dim, keep)
    values.copy_(found.values)
    indices.copy_(found.indices)


@kernel("aclnnMinDim", "TIbTT")
def _min_along(x: Tensor, dim: int, keep: bool, values: Tensor, indices: Tensor) -> None:
    found = x.min(dim, keep)
    values.copy_(found.values)
    indices.copy_(found.indices)


@kernel("aclnnAmax", "TAbT")
def _amax(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    out.copy_(x.amax(dims, keep).view(out.shape))


@kernel("aclnnAmin", "TAbT")
def _amin(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    out.copy_(x.amin(dims, keep).view(out.shape))


@kernel("aclnnAminmax", "TAbTT")
def _aminmax(x: Tensor, dims: list[int], keep: bool, least: Tensor, most: Tensor) -> None:
    least.copy_(x.amin(dims, keep).view(least.shape))
    most.copy_(x.amax(dims, keep).view(most.shape))


@kernel("aclnnArgMax", "TIbT")
def _argmax(x: Tensor, dim: int, keep: bool, out: Tensor) -> None:
    out.copy_(x.argmax(dim, keep).view(out.shape))


@kernel("aclnnArgMin", "TIbT")
def _argmin(x: Tensor, dim: int, keep: bool, out: Tensor) -> None:
    out.copy_(x.argmin(dim, keep).view(out.shape))


@kernel("aclnnAll", "TAbT")
def _all(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    out.copy_(torch.all(x, dims, keepdim=keep).view(out.shape) if dims else x.all())


@kernel("aclnnAny", "TAbT")
def _any(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    out.copy_(torch.any(x, dims, keepdim=keep).view(out.shape) if dims else x.any())


@kernel("aclnnProd", "TiT")
def _prod(x: Tensor, dtype: int, out: Tensor) -> None:
    out.copy_(x.prod(dtype=out.dtype))


@kernel("aclnnProdDim", "TIbiT")
def _prod_along(x: Tensor, dim: int, keep: bool, dtype: int, out: Tensor) -> None:
    out.copy_(x.prod(dim, keep, dtype=out.dtype))


@kernel("aclnnCumsum", "TIiT")
def _cumsum(x: Tensor, dim: int, dtype: int, out: Tensor) -> None:
    out.copy_(x.cumsum(dim, dtype=out.dtype))


@kernel("aclnnCumsumV2", "TIbbT")
def _cumsum_either_way(x: Tensor, dim: int, exclusive: bool, reverse: bool, out: Tensor) -> None:
    source = x.flip(dim) if reverse else x
    result = source.cumsum(dim, dtype=out.dtype)
    if exclusive:
        result = result - source
    out.copy_(result.flip(dim) if reverse else result)


@kernel("aclnnSort", "TbIbTT")
def _sort(x: Tensor, stable: bool, dim: int, descending: bool, values: Tensor, indices: Tensor) -> None:
    # Stable always: an unstable order may be any, and this one is the same in every run.
    found = torch.sort(x, stable=True, dim=dim, descending=descending)
    values.copy_(found.values)
    indices.copy_(found.indices)


@kernel("aclnnArgsort", "TIbT")
def _argsort(x: Tensor, dim: int, descending: bool, indices: Tensor) -> None:
    indices.copy_(torch.argsort(x, stable=True, dim=dim, descending=descending))


@kernel("aclnnTopk", "TIIbbTT")
def _topk(x: Tensor, k: int, dim: int, largest: bool, ordered: bool, values: Tensor, indices: Tensor) -> None:
    found = torch.topk(x, k, dim, largest, True)
    values.copy_(found.values)
    indices.copy_(found.indices)


@kernel("aclnnTopkV2", "TIIbbiTT")
def _topk_of_index_type(
    x: Tensor, k: int, dim: int, largest: bool, ordered: bool, index_type: int, values: Tensor, indices: Tensor
) -> None:
    _topk(x, k, dim, largest, ordered, values, indices)


@kernel("aclnnKthvalue", "TIIbTT")
def _kthvalue(x: Tensor, k: int, dim: int, keep: bool, values: Tensor, indices: Tensor) -> None:
    found = torch.kthvalue(x, k, dim, keep)
    values.copy_(found.values)
    indices.copy_(found.indices)


@kernel("aclnnSoftmax", "TIT")
def _softmax(x: Tensor, dim: int, out: Tensor) -> None:
    # An output in float32 of a narrower input asks for the arithmetic in float32 (softmax with dtype).
    out.copy_(torch.softmax(x, dim, dtype=out.dtype))


@kernel("aclnnLogSoftmax", "TIT")
def _log_softmax(x: Tensor, dim: int, out: Tensor) -> None:
    out.copy_(torch.log_softmax(x, dim, dtype=out.dtype))


@kernel("aclnnLogSumExp", "TAbT")
def _log_sum_exp(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    out.copy_(torch.logsumexp(x, dims, keep))


@kernel("aclnnVarCorrection", "TAIbT")
def _var(x: Tensor, dims: list[int], correction: int, keep: bool, out: Tensor) -> None:
    out.copy_(torch.var(x, dims or None, correction=correction, keepdim=keep).view(out.shape))


@kernel("aclnnVarMean", "TAIbTT")
def _var_mean(x: Tensor, dims: list[int], correction: int, keep: bool, var: Tensor, mean: Tensor) -> None:
    found = torch.var_mean(x, dims or None, correction=correction, keepdim=keep)
    var.copy_(found[0].view(var.shape))
    mean.copy_(found[1].view(mean.shape))


@kernel("aclnnStd", "TAIbT")
def _std(x: Tensor, dims: list[int], correction: int, keep: bool, out: Tensor) -> None:
    out.copy_(torch.std(x, dims or None, correction=correction, keepdim=keep).view(out.shape))


@kernel("aclnnLinalgVectorNorm", "TSAbiT")
def _vector_norm(x: Tensor, order: Any, dims: list[int], keep: bool, dtype: int, out: Tensor) -> None:
    out.copy_(torch.linalg.vector_norm(x, order, dims or None, keep, dtype=out.dtype).view(out.shape))


@kernel("aclnnNorm", "TSAbT")
def _norm(x: Tensor, order: Any, dims: list[int], keep: bool, out: Tensor) -> None:
    out.copy_(torch.linalg.vector_norm(x, order, dims or None, keep).view(out.shape))


@kernel("aclnnBincount", "TTIT")
def _bincount(x: Tensor, weights: Tensor | None, length: int, out: Tensor) -> None:
    out.copy_(torch.bincount(x.flatten().long(), weights, out.numel()))


@kernel("aclnnHistc", "TISST")
def _histc(x: Tensor, bins: int, low: Any, high: Any, out: Tensor) -> None:
    out.copy_(torch.histc(x.double(), bins, low, high))
