"""Norms, gates and activations in which the plugin's passes must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Norm(nn.Module):
    """An RMSNorm as models write it, rounded to x's dtype before the weight (`rounds`) or once at the end."""

    def __init__(self, width: int, generator: torch.Generator, *, rounds: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width, generator=generator))
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype) if self.rounds else (self.weight * normed).to(x.dtype)


class _QueryAndKey(nn.Module):
    """Query and key of one product, each normed over all its heads, or head by head with the heads first."""

    def __init__(self, query: int, key: int, *, by_head: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(70)
        self.product = nn.Parameter(torch.randn(query + key, 24, generator=generator) / 5)
        sizes = (8, 8) if by_head else (query, key)
        self.norms = nn.ModuleList(_Norm(size, generator, rounds=by_head) for size in sizes)
        self.widths, self.by_head = (query, key), by_head

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = (x @ self.product.t()).split(self.widths, -1)
        if self.by_head:
            parts = tuple(part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        first, second = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        return first.sin(), second.cos()


class _Compressed(nn.Module):
    """Compressed rows of query and key, of which the second are cut out after the first ones' result is used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(69)
        self.norms = nn.ModuleList(_Norm(width, generator, rounds=True) for width in (16, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        query, compressed = x.split((16, 8), -1)
        query = self.norms[0](query).sin()
        key, turned = compressed.split((5, 3), -1)
        return query, self.norms[1](key).cos(), turned


def norm_pairs() -> Iterator[Example]:
    """Yield norms of query and key, of unequal widths, of heads and of compressed rows."""
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(71))
    yield _QueryAndKey(48, 16, by_head=False), (x,)
    yield _QueryAndKey(32, 16, by_head=True), (x,)
    yield _Compressed(), (x,)


class _Normed(nn.Module):
    """Layers that norm their result before they add it, and norm the sum before the next one, or not."""

    def __init__(self, width: int, *, then: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(72)
        self.after = nn.ModuleList(_Norm(width, generator, rounds=True) for _ in range(2))
        self.before = nn.ModuleList(_Norm(width, generator, rounds=False) for _ in range(2)) if then else None

    def forward(self, x: Tensor) -> Tensor:
        for index, norm in enumerate(self.after):
            x = x + norm((x if self.before is None else self.before[index](x)).sin())
        return x


def normed_sums() -> Iterator[Example]:
    """Yield sums with the norm of the sum and without."""
    for then in (True, False):
        yield _Normed(40, then=then), (torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(73)),)


class _GatedNorm(nn.Module):
    """The gate before a norm in groups of columns, the weight in x's dtype behind it; or the gate behind a norm."""

    def __init__(self, width: int, groups: int, *, norm_first: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(74)
        self.norm = _Norm(width, generator, rounds=True)
        self.groups, self.norm_first = groups, norm_first

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, -1)
        act = functional.silu(gate.to(torch.float32))
        if self.norm_first:
            behind: Tensor = self.norm(value.sin()) * act
            return behind.to(x.dtype)
        gated = (value.sin().to(torch.float32) * act).unflatten(-1, (self.groups, -1))
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-6)
        result: Tensor = self.norm.weight * normed.flatten(-2).to(x.dtype)
        return result


def gated_norms() -> Iterator[Example]:
    """Yield norms of what is gated, in one group of columns and in several, and a gate of what is normed."""
    x = torch.randn(2, 7, 80, generator=torch.Generator().manual_seed(75))
    for groups in (1, 4):
        yield _GatedNorm(40, groups, norm_first=False), (x,)
    yield _GatedNorm(40, 1, norm_first=True), (x,)


class _Squared(nn.Module):
    """Two projections with a squared ReLU between them, by one call or by a product, of all rows or of a slice."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(83)
        self.up = nn.Parameter(torch.randn(56, 40, generator=generator) / 6)
        self.down = nn.Parameter(torch.randn(40, 48 if sliced else 56, generator=generator) / 6)
        self.sliced = sliced

    def forward(self, x: Tensor) -> Tensor:
        up = x @ self.up.t()
        positive = torch.relu(up[..., 8:] if self.sliced else up)
        return (positive * positive if self.sliced else positive.square()) @ self.down.t()


def squared_relus() -> Iterator[Example]:
    """Yield both."""
    for sliced in (False, True):
        yield _Squared(sliced=sliced), (torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(84)),)
