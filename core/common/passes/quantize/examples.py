"""Modules in which the fusions with a quantisation must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SIZE, _INNER, _TOKENS = 48, 64, 5
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Codes(nn.Module):
    """The input quantisation of a quantised layer; scale: a static scale, or 0 to compute one per row or group."""

    input_scale: Tensor | None

    def __init__(self, dtype: torch.dtype, *, scale: float = 0.0, group: int = 0) -> None:
        super().__init__()
        self.register_buffer("input_scale", torch.tensor(scale) if scale else None)
        self.group = group
        granularity = "group" if group else "tensor" if scale else "token"
        self.options: dict[str, Any] = {"dtype": dtype, "granularity": granularity, "group_size": group}

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., D) quantised and dequantised again, in x's dtype."""
        codes, scale = torch.ops.core.quantize(x, self.input_scale, **self.options)
        wide: Tensor = codes.to(scale.dtype)
        values = (wide.unflatten(-1, (-1, self.group)) * scale[..., None]).flatten(-2) if self.group else wide * scale
        out: Tensor = values.to(x.dtype)
        return out


class _Norms(nn.Module):
    """Two layers that quantise a normed input; returns the residual sum too, if there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.4, 1.7, _SIZE))
        self.first, self.second = (_Codes(**options) for _ in range(2))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        total = x if residual is None else x + residual
        normed = functional.rms_norm(total, (_SIZE,), self.weight, 3e-4)
        return self.first(normed).sin(), self.second(normed).cos(), *(() if residual is None else (total * 2,))


class _Gate(nn.Module):
    """A gated activation of two tensors, or of two halves of one, and a layer that quantises the product."""

    def __init__(self, *, merged: bool, **options: Any) -> None:
        super().__init__()
        self.merged = merged
        self.down = _Codes(**options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate, up = torch.cat((x, y), -1).chunk(2, -1) if self.merged else (x, y)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


def _rows(width: int, count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(40)
    return tuple(torch.randn(2, _TOKENS, width, generator=generator) for _ in range(count))


def norms() -> Iterator[Example]:
    """Yield norms that end in codes of both formats, by token and by group."""
    yield _Norms(dtype=_FP8), _rows(_SIZE, 1)
    yield _Norms(dtype=_INT8, group=16), _rows(_SIZE, 1)


def norms_of_sums() -> Iterator[Example]:
    """Yield norms of sums that end in codes, by token and by one scale that is given."""
    yield _Norms(dtype=_INT8), _rows(_SIZE, 2)
    yield _Norms(dtype=_FP8, scale=0.02), _rows(_SIZE, 2)


def gates() -> Iterator[Example]:
    """Yield gates of two tensors and of one."""
    yield _Gate(merged=False, dtype=_INT8), _rows(_INNER, 2)
    yield _Gate(merged=True, dtype=_FP8, scale=0.02), _rows(_INNER, 2)
    yield _Gate(merged=True, dtype=_FP8, group=16), _rows(_INNER, 2)


def equal_scales() -> Iterator[Example]:
    """Yield layers of one input with scales of their own that are equal."""
    yield _Norms(dtype=_FP8, scale=0.02), _rows(_SIZE, 1)
