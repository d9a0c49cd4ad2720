"""Lets kernels over rows give results with the strides of torch's elementwise ops, by ordering dimensions.

torch_npu's kernels over rows read any strides and give contiguous results. Canonical ops promise the strides that
elementwise torch ops give, those of the operands: the dimensions are put in the order of memory before the kernel and
back after it, which copies nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rows", "rows_of"]


@dataclass(frozen=True, slots=True)
class Rows:
    """How operands are passed to a kernel over rows (..., D), and how its results are converted back."""

    #: Order of the dimensions in memory; None where they stand in it already.
    order: tuple[int, ...] | None = None
    #: Strides of results that no such order leads to, as where rows lie across memory; results are then copied.
    strides: tuple[int, ...] | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """Return an operand (..., D) as the kernel is to see it."""
        return tensor if self.order is None else tensor.permute(self.order)

    def give(self, result: Tensor) -> Tensor:
        """Return a contiguous result of the kernel, of the operands' shape but for the last size, as promised."""
        if self.order is not None:
            return result.permute([self.order.index(dim) for dim in range(len(self.order))])
        if self.strides is not None:
            return torch.empty_strided(result.shape, self.strides, dtype=result.dtype, device=result.device).copy_(
                result
            )
        return result


_AS_THEY_ARE = Rows()


def rows_of(*operands: Tensor) -> Rows:
    """Return the rows of operands of one shape (..., D), for results that lie as the sum of the operands would."""
    if all(each.is_contiguous() for each in operands):
        return _AS_THEY_ARE
    return _rows(tuple(operands[0].shape), tuple(each.stride() for each in operands))


@functools.lru_cache(maxsize=1024)
def _rows(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> Rows:
    # torch does not document its rule for strides, so ask it once for each form of operands.
    first, *others = (torch.empty_strided(shape, each, device="meta") for each in strides)
    made = (sum(others, start=first) if others else first * 2.0).stride()
    order = tuple(sorted(range(len(shape)), key=lambda dim: -made[dim]))  # stable: dimensions of size 1 may be anywhere
    if order == tuple(range(len(shape))) or 0 in shape:
        return _AS_THEY_ARE
    return Rows(order=order) if order[-1] == len(shape) - 1 else Rows(strides=made)
