"""Kernels that reduce or scan a dimension: sums, extremes, sorting, softmax, statistics.

Arguments as torch has them: `dims`, none for all; `keep`, whether a reduced dimension stays with size one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.formulas import stored
from simulator.marshal import kernel

_WITH_DTYPE: dict[str, tuple[str, Any]] = {
    # In the output's dtype, float32 for the narrow types, as on the device and in torch's own reduction.
    "ReduceSum": ("TAbiT", lambda x, dims, keep, _, dtype: x.sum(dims or None, keepdim=keep, dtype=dtype)),
    "Mean": ("TAbiT", lambda x, dims, keep, _, dtype: x.mean(dims or None, keepdim=keep, dtype=dtype)),
    "Prod": ("TiT", lambda x, _, dtype: x.prod(dtype=dtype)),
    "ProdDim": ("TIbiT", lambda x, dim, keep, _, dtype: x.prod(dim, keep, dtype=dtype)),
    "Cumsum": ("TIiT", lambda x, dim, _, dtype: x.cumsum(dim, dtype=dtype)),
    # An output in float32 of a narrower input asks for the arithmetic in float32 (softmax with dtype).
    "Softmax": ("TIT", torch.softmax),
    "LogSoftmax": ("TIT", torch.log_softmax),
    "LinalgVectorNorm": (
        "TSAbiT",
        lambda x, order, dims, keep, _, dtype: torch.linalg.vector_norm(x, order, dims or None, keep, dtype=dtype),
    ),
}
_ONE_RESULT: dict[str, tuple[str, Any]] = {
    "Max": ("TT", torch.max),
    "Min": ("TT", torch.min),
    "Amax": ("TAbT", torch.amax),
    "Amin": ("TAbT", torch.amin),
    "ArgMax": ("TIbT", torch.argmax),
    "ArgMin": ("TIbT", torch.argmin),
    "All": ("TAbT", lambda x, dims, keep: torch.all(x, dims, keepdim=keep) if dims else x.all()),
    "Any": ("TAbT", lambda x, dims, keep: torch.any(x, dims, keepdim=keep) if dims else x.any()),
    "Argsort": ("TIbT", lambda x, dim, descending: torch.argsort(x, stable=True, dim=dim, descending=descending)),
    "LogSumExp": ("TAbT", torch.logsumexp),
    "VarCorrection": (
        "TAIbT",
        lambda x, dims, correction, keep: torch.var(x, dims or None, correction=correction, keepdim=keep),
    ),
    "Std": ("TAIbT", lambda x, dims, correction, keep: torch.std(x, dims or None, correction=correction, keepdim=keep)),
    "Norm": ("TSAbT", lambda x, order, dims, keep: torch.linalg.vector_norm(x, order, dims or None, keep)),
    "Histc": ("TISST", lambda x, bins, low, high: torch.histc(x.double(), bins, low, high)),
}
_TWO_RESULTS: dict[str, tuple[str, Any]] = {
    "MaxDim": ("TIbTT", torch.max),
    "MinDim": ("TIbTT", torch.min),
    "Aminmax": ("TAbTT", lambda x, dims, keep: (x.amin(dims, keep), x.amax(dims, keep))),
    # Stable always: an unstable order may be any, and this one is the same in every run.
    "Sort": ("TbIbTT", lambda x, _, dim, descending: torch.sort(x, stable=True, dim=dim, descending=descending)),
    "Topk": ("TIIbbTT", lambda x, k, dim, largest, _: torch.topk(x, k, dim, largest, True)),
    "TopkV2": ("TIIbbiTT", lambda x, k, dim, largest, _, index_type: torch.topk(x, k, dim, largest, True)),
    "Kthvalue": ("TIIbTT", torch.kthvalue),
    "VarMean": (
        "TAIbTT",
        lambda x, dims, correction, keep: torch.var_mean(x, dims or None, correction=correction, keepdim=keep),
    ),
}
stored(_WITH_DTYPE, typed=True)
stored(_ONE_RESULT)
stored(_TWO_RESULTS, 2)


@kernel("aclnnCumsumV2", "TIbbT")
def _cumsum_either_way(x: Tensor, dim: int, exclusive: bool, reverse: bool, out: Tensor) -> None:
    source = x.flip(dim) if reverse else x
    result = source.cumsum(dim, dtype=out.dtype)
    if exclusive:
        result = result - source
    out.copy_(result.flip(dim) if reverse else result)


@kernel("aclnnBincount", "TTIT")
def _bincount(x: Tensor, weights: Tensor | None, length: int, out: Tensor) -> None:
    out.copy_(torch.bincount(x.flatten().long(), weights, out.numel()))
