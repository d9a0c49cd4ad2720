"""Draws for calls of `sgl_kernel`'s ops: sizes that the kernels accept, rows, numbers and codes.

Head sizes are 64, widths are multiples of 32. Legend: T tokens, H heads, D head size, K and N in and out features,
E experts, INNER the intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.common.ops.arguments import Draw

T, H, D, K, N, E, INNER = 7, 2, 64, 64, 96, 8, 64
EPS = 1e-5


def wide(draw: Draw, rows: int, width: int) -> Tensor:
    """Return rows that lie in rows twice as wide."""
    return draw(rows, 2 * width)[:, :width]


def ints(draw: Draw, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return these whole numbers as a tensor."""
    return torch.tensor(values, dtype=dtype, device=draw.device)


def codes(draw: Draw, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return codes from -100 to 100, whatever the type holds them as."""
    return (draw(*shape, dtype=torch.float32) * 20).clamp(-100, 100).to(dtype)
