"""Modules in which the processor's passes must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_SIZE, _TOKENS = 48, 5


class _Layers(nn.Module):
    """Layers of int8 codes that read one input by one quantisation, in place of query, key and value."""

    def __init__(self, widths: tuple[int, ...], *, has_bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(50)
        for index, width in enumerate(widths):
            codes = torch.randint(-127, 128, (width, _SIZE), dtype=torch.int8, generator=generator)
            self.register_buffer(f"codes_{index}", codes)
            self.register_buffer(f"scale_{index}", torch.rand(width, 1, generator=generator) * 0.02 + 0.01)
            bias = torch.randn(width, generator=generator) if has_bias and index else None
            self.register_parameter(f"bias_{index}", None if bias is None else nn.Parameter(bias))
        self.num = len(widths)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, scale = torch.ops.core.quantize(x, None, dtype=torch.int8)
        # A model's cast changes these scales; those of quantised layers stay fp32.
        scales = [getattr(self, f"scale_{index}").float() for index in range(self.num)]
        results = []
        for index, each in enumerate(scales):
            weight, bias = (getattr(self, f"{name}_{index}") for name in ("codes", "bias"))
            y = torch.ops.core.quantized_linear(codes, scale, weight, each, bias, out_dtype=x.dtype)
            results.append(y.sin())
        return tuple(results)


def layers_of_one_input() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield two, three and four layers of one input, with biases and without, of widths that can't be merged."""
    x = torch.randn(2, _TOKENS, _SIZE, generator=torch.Generator().manual_seed(51))
    yield _Layers((33, 17, 25), has_bias=False), (x,)
    yield _Layers((41, 41), has_bias=True), (x,)
    yield _Layers((9, 17, 25, 11), has_bias=True), (x,)
