"""Modules that lay out columns of a product anew, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Heads(nn.Module):
    """Columns of key heads in turn, each with a query, a key, values and gates, taken apart as Qwen3-Next does it."""

    def __init__(self, heads: int, key: int, value: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(85)
        self.product = nn.Parameter(torch.randn(heads * 2 * (key + value), 24, generator=generator) / 5)
        self.heads, self.widths = heads, (key, key, value, value)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = (x @ self.product.t()).unflatten(-1, (self.heads, -1)).split(self.widths, -1)
        query, key, value, gate = (part.reshape(*x.shape[:-1], -1) for part in parts)
        return torch.cat((query, key, value), -1).sin(), gate.sigmoid()


class _Pairs(nn.Module):
    """Two results of heads that each hold both, as `chunk` takes them apart."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(86)
        self.product = nn.Parameter(torch.randn(2 * heads * width, 24, generator=generator) / 5)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        query, gate = (x @ self.product.t()).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        result: Tensor = query.flatten(-2).sin() * gate.flatten(-2).sigmoid()
        return result


def gathered_columns() -> Iterator[Example]:
    """Yield both."""
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(87))
    yield _Heads(2, 8, 16), (x,)
    yield _Pairs(3, 8), (x,)
