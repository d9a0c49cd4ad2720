"""Kernels that rearrange: concatenation, repetition, padding, flips and splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.marshal import kernel


@kernel("aclnnCat", "LIT")
def _cat(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    # One-dimensional empty tensors are skipped, as torch.cat has it since its beginnings.
    filled = [tensor for tensor in tensors if not (tensor.dim() == 1 and tensor.numel() == 0)]
    if filled:
        out.copy_(torch.cat(filled, dim))


@kernel("aclnnStack", "LIT")
def _stack(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    out.copy_(torch.stack(tensors, dim))


@kernel("aclnnRepeat", "TAT")
def _repeat(x: Tensor, repeats: list[int], out: Tensor) -> None:
    out.copy_(x.repeat(repeats))


@kernel("aclnnRepeatInterleave", "TTIT")
def _repeat_each(x: Tensor, repeats: Tensor, size: int, out: Tensor) -> None:
    out.copy_(x.repeat_interleave(repeats))


@kernel("aclnnRepeatInterleaveInt", "TIIT")
def _repeat_each_by_int(x: Tensor, repeats: int, size: int, out: Tensor) -> None:
    out.copy_(x.repeat_interleave(repeats))


@kernel("aclnnRepeatInterleaveWithDim", "TTIIT")
def _repeat_along(x: Tensor, repeats: Tensor, dim: int, size: int, out: Tensor) -> None:
    out.copy_(x.repeat_interleave(repeats, dim))


@kernel("aclnnRepeatInterleaveIntWithDim", "TIIIT")
def _repeat_along_by_int(x: Tensor, repeats: int, dim: int, size: int, out: Tensor) -> None:
    out.copy_(x.repeat_interleave(repeats, dim))


@kernel("aclnnRepeatInterleaveTensor", "TIT")
def _repeat_indices(repeats: Tensor, size: int, out: Tensor) -> None:
    out.copy_(torch.repeat_interleave(repeats))


@kernel("aclnnConstantPadNd", "TAST")
def _pad(x: Tensor, pad: list[int], value: Any, out: Tensor) -> None:
    out.copy_(torch.constant_pad_nd(x, pad, value))


@kernel("aclnnFlip", "TAT")
def _flip(x: Tensor, dims: list[int], out: Tensor) -> None:
    out.copy_(x.flip(dims))


@kernel("aclnnRoll", "TAAT")
def _roll(x: Tensor, shifts: list[int], dims: list[int], out: Tensor) -> None:
    out.copy_(x.roll(shifts, dims))


@kernel("aclnnSplitWithSize", "TAIL")
def _split(x: Tensor, sizes: list[int], dim: int, out: list[Tensor]) -> None:
    for part, target in zip(x.split(sizes, dim), out, strict=True):
        target.copy_(part)


@kernel("aclnnPermute", "TAT")
def _permute(x: Tensor, dims: list[int], out: Tensor) -> None:
    out.copy_(x.permute(dims))
