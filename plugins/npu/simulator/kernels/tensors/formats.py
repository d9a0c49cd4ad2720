"""Casts between the plain storage format and the one of matrices in tiles: aclnnNpuFormatCast."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import demand
from simulator.marshal import Stored, kernel


def in_tiles(plain: Tensor, shape: list[int]) -> Tensor:
    """Return matrices (…, M, N) as tiles (…, N / C, M / R, R, C), zeros behind the last row and column."""
    columns, rows, height, width = shape[-4:]
    padded = torch.zeros(*plain.shape[:-2], rows * height, columns * width, dtype=plain.dtype)
    padded[..., : plain.shape[-2], : plain.shape[-1]] = plain
    tiles: Tensor = padded.unflatten(-1, (columns, width)).unflatten(-3, (rows, height)).movedim(-2, -4)
    return tiles


def from_tiles(tiles: Tensor, size: list[int]) -> Tensor:
    """Return the matrices that tiles hold."""
    return tiles.movedim(-4, -2).flatten(-2).flatten(-3, -2)[..., : size[-2], : size[-1]]


@kernel("aclnnNpuFormatCast", "TT", formats=True)
def format_cast(source: Stored, target: Stored) -> None:
    """Copy matrices into tiles or out of them."""
    demand(source.private is not target.private and source.size == target.size, f"{source.size} to {target.size}")
    if target.private:
        target.memory.copy_(in_tiles(source.memory, list(target.memory.shape)))
    else:
        target.memory.copy_(from_tiles(source.memory, target.size))
