"""`Source`: draws the tensors and options of one call from a hypothesis example.

Contents come from a generator seeded by the drawn example, so that an example can be repeated and shrinks by its shapes
and options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

LAYOUTS = ("dense", "wider rows", "swapped", "columns", "offset")
"""How a tensor lies in memory, the simplest first; see `arranged`.

Expanded tensors are left out: beside one that is swapped, torch's own fakes lay out a sum otherwise than its kernels.
"""

WIDTHS = (1, 2, 3, 8, 31, 48, 64, 100, 257, 512)
"""Row sizes, none of them special to any kernel but some to most."""


WIDE = (8208, 16_400)
"""Row sizes past those that kernels hold in the registers of one block; groups of 16 fit, larger tiles do not."""

_LONG = (((1041,), 1008), ((2050,), 512), ((64,), 16_400))
"""Rows and row size of tensors with more than 2**20 elements."""

_SIZES = (*["small"] * 10, "wide", "long")
"""The sizes that `Source.sized` draws from; large ones are rare, since they take as long as all others together."""


class Source:
    """Draws the arguments of one call. dtype, device: of the op's floating tensors."""

    def __init__(self, draw: Callable[[SearchStrategy[Any]], Any], dtype: torch.dtype, device: torch.device) -> None:
        from hypothesis import strategies

        self.draw = draw
        self.dtype = dtype
        self.device = device
        self._strategies = strategies
        self._generator = torch.Generator().manual_seed(self.integer(0, 2**16))

    def integer(self, least: int, most: int) -> int:
        """Draw a number, small ones first when an example shrinks."""
        number: int = self.draw(self._strategies.integers(least, most))
        return number

    def one_of(self, *choices: Any) -> Any:
        """Draw one of these; the first is the simplest."""
        return self.draw(self._strategies.sampled_from(choices))

    def shape(self, *, most_ranks: int = 3, most: int = 9) -> tuple[int, ...]:
        """Draw leading dimensions, empty ones included."""
        dimensions = self._strategies.integers(0, most)
        sizes: list[int] = self.draw(self._strategies.lists(dimensions, min_size=1, max_size=most_ranks))
        return tuple(sizes)

    def sized(self, widths: tuple[int, ...] = WIDTHS, *, most_ranks: int = 3) -> tuple[tuple[int, ...], int]:
        """Draw leading dimensions and a row size: small ones mostly, at times a few wide rows, or 2**20 elements."""
        size = self.one_of(*_SIZES)
        if size == "long":
            leading, width = self.one_of(*_LONG)
            return leading, width
        wide = size == "wide"
        return self.shape(most_ranks=1 if wide else most_ranks, most=3 if wide else 9), self.one_of(
            *(WIDE if wide else widths)
        )

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Return a tensor of this shape in a drawn memory layout, normal with this deviation and mean."""
        layout = self.one_of(*LAYOUTS) if shape else "dense"
        return arranged(self.dense(*shape, dtype=dtype, scale=scale, shift=shift), layout)

    def maybe(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, shift: float = 0.0) -> Any:
        """Return None or a tensor as `tensor` does."""
        return self.tensor(*shape, dtype=dtype, scale=scale, shift=shift) if self.one_of(False, True) else None

    def dense(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Return a contiguous tensor of this shape, normal with this deviation and mean."""
        normal = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale + shift
        return normal.to(dtype or self.dtype).to(self.device)

    def booleans(self, *shape: int, share: float) -> Tensor:
        """Return booleans on the host, this share of them true."""
        return torch.rand(shape, generator=self._generator) < share

    def order(self, count: int) -> Tensor:
        """Return the numbers below count in random order, on the host."""
        return torch.randperm(count, generator=self._generator)


def arranged(values: Tensor, layout: str) -> Tensor:
    """Return a tensor of these values in another memory layout.

    wider rows: the middle of longer rows. swapped: first and second last dimension swapped in memory, where there are
    three. columns: the elements of a row apart. offset: off the start of the memory, by one element.
    """
    if layout == "wider rows":
        wide = values.new_full((*values.shape[:-1], values.shape[-1] + 5), math.nan)
        return wide[..., 2 : 2 + values.shape[-1]].copy_(values)
    if layout == "swapped" and values.dim() > 2:
        return values.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "columns":
        return torch.stack((values, torch.full_like(values, math.nan)), dim=-1)[..., 0]
    if layout == "offset":
        flat = values.new_empty(values.numel() + 1)
        return flat[1:].view(values.shape).copy_(values)
    return values
