"""Modules in which the fusions around norms must match, written as models for the device are, for the suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SIZE = 64
Example = tuple[nn.Module, tuple[Tensor, ...]]


def _rows(count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(60)
    return tuple(torch.randn(2, 5, _SIZE, generator=generator) for _ in range(count))


def _row(low: float, high: float = 1.7) -> nn.Parameter:
    return nn.Parameter(torch.linspace(low, high, _SIZE))


class _Sums(nn.Module):
    """Two norms of sums: one whose sum goes on, one whose sum nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _row(0.3), _row(0.6)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        y = torch.ops.npu.npu_rms_norm(total, self.first, 3e-5)[0]
        return y, torch.ops.npu.npu_rms_norm(y + total.sin(), self.second, 1e-6)[0], total


class _Dynamic(nn.Module):
    """Norms of sums whose codes go on, into a product as in models: plain, smoothed with a bias, of flattened rows; so
    do their sums.

    Values of codes that are returned as they are leave T1 to chance in fp16: about one code in a hundred moves by a
    step, and T1 leaves a hundredth of the errors out as isolated. A product spreads each such step over a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta, self.smooth = _row(0.4), _row(-0.6), _row(0.2)
        generator = torch.Generator().manual_seed(61)
        self.weight = nn.Parameter(torch.randn(_SIZE, _SIZE, generator=generator) / _SIZE**0.5)

    def _product(self, codes: Tensor, scale: Tensor, *, like: Tensor) -> Tensor:
        values = (codes.to(scale.dtype) * scale[..., None]).to(like.dtype)
        return nn.functional.linear(values, self.weight)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        ops: Any = torch.ops.npu
        y, _, total = ops.npu_add_rms_norm(x, residual, self.gamma, 2e-5)
        first = self._product(*ops.npu_dynamic_quant(y), like=x)
        y, _, total = ops.npu_add_rms_norm(first, total, self.gamma)
        second = self._product(*ops.npu_dynamic_quant(y + self.beta, smooth_scales=self.smooth), like=x)
        y, _, total = ops.npu_add_rms_norm(second, total, self.gamma, 1e-3)
        return first, second, self._product(*ops.npu_dynamic_quant(y.flatten(0, 1)), like=x), total


class _Static(nn.Module):
    """Norms whose codes by given scales go on. add: norms of sums, which go on too; with: a bias before the codes."""

    def __init__(self, *, add: bool, bias: bool, divides: bool) -> None:
        super().__init__()
        self.gamma, self.beta = _row(0.4), _row(-0.6)
        self.scales = _row(0.02, 0.05) if add else nn.Parameter(torch.tensor([40.0]))
        self.add, self.bias, self.divides = add, bias, divides

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        ops: Any = torch.ops.npu
        scales = self.scales if self.divides or not self.add else 1 / self.scales
        if self.add:
            y, _, total = ops.npu_add_rms_norm(x, residual, self.gamma, 2e-5)
        else:
            y, total = ops.npu_rms_norm(x, self.gamma, 2e-5)[0], residual
        y = y + self.beta if self.bias else y
        codes = ops.npu_quantize(y, scales, None, torch.qint8, -1, self.divides)
        return codes.to(x.dtype) * self.scales.to(x.dtype), total.sin()


class _Routed(nn.Module):
    """Norms of sums that are read in fp32 too, as rows or in one dimension less."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = _row(0.4)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, self.gamma, 2e-5)
        wide = y.float().sigmoid()
        z, _, total = torch.ops.npu.npu_add_rms_norm(y, total, self.gamma)
        return y.sin(), wide, z.view(-1, z.shape[-1]).to(torch.float32).tanh(), z.cos(), total


def sums() -> Iterator[Example]:
    """Yield norms of sums."""
    yield _Sums(), _rows(2)


def dynamic_norms() -> Iterator[Example]:
    """Yield norms of sums with every form of quantisation by token after them."""
    yield _Dynamic(), _rows(2)


def static_norms_of_sums() -> Iterator[Example]:
    """Yield norms of sums with quantisation by given scales, divided or multiplied by, with and without a bias."""
    for bias, divides in ((False, True), (False, False), (True, True)):
        yield _Static(add=True, bias=bias, divides=divides), _rows(2)


def static_norms() -> Iterator[Example]:
    """Yield norms with quantisation by one given scale, with and without a bias."""
    for bias in (False, True):
        yield _Static(add=False, bias=bias, divides=False), _rows(2)


def cast_norms() -> Iterator[Example]:
    """Yield norms of sums that are read in fp32 too."""
    yield _Routed(), _rows(2)
