"""Kernels that copy, fill, cast and make values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.marshal import kernel


@kernel("aclnnInplaceCopy", "TT")
def _copy(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)


@kernel("aclnnCast", "TiT")
def _cast(x: Tensor, dtype: int, out: Tensor) -> None:
    out.copy_(x)


@kernel("aclnnInplaceZero", "T")
def _zero(x: Tensor) -> None:
    x.zero_()


@kernel("aclnnInplaceOne", "T")
def _one(x: Tensor) -> None:
    x.fill_(1)


@kernel("aclnnInplaceFillScalar", "TS")
def _fill(x: Tensor, value: Any) -> None:
    x.fill_(value)


@kernel("aclnnInplaceFillTensor", "TT")
def _fill_tensor(x: Tensor, value: Tensor) -> None:
    x.copy_(value.reshape(()))


@kernel("aclnnInplaceFillDiagonal", "TSb")
def _fill_diagonal(x: Tensor, value: Any, wrap: bool) -> None:
    x.fill_diagonal_(value, wrap)


@kernel("aclnnArange", "SSST")
def _arange(start: Any, end: Any, step: Any, out: Tensor) -> None:
    out.copy_(torch.arange(start, end, step, dtype=out.dtype))


@kernel("aclnnRange", "SSST")
def _range(start: Any, end: Any, step: Any, out: Tensor) -> None:
    # Inclusive of its end, as torch.range; torch_npu gives the number of elements with the output.
    out.copy_(start + step * torch.arange(out.numel(), dtype=out.dtype))


@kernel("aclnnLinspace", "SSIT")
def _linspace(start: Any, end: Any, steps: int, out: Tensor) -> None:
    out.copy_(torch.linspace(start, end, steps, dtype=out.dtype))


@kernel("aclnnEye", "IIT")
def _eye(n: int, m: int, out: Tensor) -> None:
    out.copy_(torch.eye(n, m, dtype=out.dtype))


@kernel("aclnnTriu", "TIT")
def _triu(x: Tensor, diagonal: int, out: Tensor) -> None:
    out.copy_(x.triu(diagonal))


@kernel("aclnnTril", "TIT")
def _tril(x: Tensor, diagonal: int, out: Tensor) -> None:
    out.copy_(x.tril(diagonal))


@kernel("aclnnInplaceTriu", "TI")
def _triu_in_place(x: Tensor, diagonal: int) -> None:
    x.triu_(diagonal)


@kernel("aclnnInplaceTril", "TI")
def _tril_in_place(x: Tensor, diagonal: int) -> None:
    x.tril_(diagonal)
