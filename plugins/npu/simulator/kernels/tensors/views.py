"""Kernels that rearrange: concatenation, repetition, padding, flips and splits."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.formulas import stored
from simulator.marshal import kernel

stored(
    {
        "Stack": ("LIT", torch.stack),
        "Repeat": ("TAT", torch.Tensor.repeat),
        "RepeatInterleave": ("TTIT", lambda x, repeats, size: x.repeat_interleave(repeats)),
        "RepeatInterleaveInt": ("TIIT", lambda x, repeats, size: x.repeat_interleave(repeats)),
        "RepeatInterleaveWithDim": ("TTIIT", lambda x, repeats, dim, size: x.repeat_interleave(repeats, dim)),
        "RepeatInterleaveIntWithDim": ("TIIIT", lambda x, repeats, dim, size: x.repeat_interleave(repeats, dim)),
        "RepeatInterleaveTensor": ("TIT", lambda repeats, size: torch.repeat_interleave(repeats)),
        "ConstantPadNd": ("TAST", torch.constant_pad_nd),
        "Flip": ("TAT", torch.flip),
        "Roll": ("TAAT", torch.roll),
        "Permute": ("TAT", torch.permute),
    }
)


@kernel("aclnnCat", "LIT")
def _cat(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    # One-dimensional empty tensors are skipped, as torch.cat has it since its beginnings.
    filled = [tensor for tensor in tensors if not (tensor.dim() == 1 and tensor.numel() == 0)]
    if filled:
        out.copy_(torch.cat(filled, dim))


@kernel("aclnnSplitWithSize", "TAIL")
def _split(x: Tensor, sizes: list[int], dim: int, out: list[Tensor]) -> None:
    for part, target in zip(x.split(sizes, dim), out, strict=True):
        target.copy_(part)
