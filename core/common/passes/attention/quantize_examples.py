"""Modules in which `fuse_attention_quantize` must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from core.common.passes.rotary import attention_examples as rotated

_FP8 = torch.float8_e4m3fn


class _Coded(nn.Module):
    """An attention after a rotation, whose rows are quantised as for an output projection."""

    def __init__(self, attention: nn.Module, **options: Any) -> None:
        super().__init__()
        self.attention = attention
        self.options = options
        self.register_buffer("scale", torch.tensor(0.0131) if options.get("granularity") == "tensor" else None)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Take the arguments of the attention; return the dequantised result, (1, T, H * D)."""
        out = self.attention(*inputs)[None]
        rows = out.reshape(1, out.shape[1], -1).contiguous()
        codes, scale = torch.ops.core.quantize(rows, self.scale, **self.options)
        values: Tensor = codes.to(rows.dtype) * scale.to(rows.dtype)
        return values


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield two modules: one with a given scale, and one with a scale per token behind normed heads."""
    forms: tuple[dict[str, Any], ...] = (
        {"dtype": _FP8, "granularity": "tensor"},
        {"dtype": torch.int8},
        {"dtype": _FP8},
    )
    for (attention, inputs), options in zip(rotated.examples(), forms, strict=True):
        yield _Coded(attention, **options), inputs
