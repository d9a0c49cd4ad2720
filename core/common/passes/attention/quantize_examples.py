"""Modules in which `fuse_attention_quantize` owes a match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from core.common.passes.rotary import attention_examples as rotated

_FP8 = torch.float8_e4m3fn


class _Coded(nn.Module):
    """An attention behind a rotation, whose rows are quantised as an output projection has it."""

    def __init__(self, attention: nn.Module, **options: Any) -> None:
        super().__init__()
        self.attention = attention
        self.options = options
        self.register_buffer("scale", torch.tensor(0.0131) if options.get("granularity") == "tensor" else None)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Take what the attention takes; return the values of the codes, (1, T, H * D)."""
        out = self.attention(*inputs)[None]
        rows = out.reshape(1, out.shape[1], -1).contiguous()
        codes, scale = torch.ops.core.quantize(rows, self.scale, **self.options)
        values: Tensor = codes.to(rows.dtype) * scale.to(rows.dtype)
        return values


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield one scale that is given, and one made of each token; the latter of normed heads."""
    forms: tuple[dict[str, Any], ...] = (
        {"dtype": _FP8, "granularity": "tensor"},
        {"dtype": torch.int8},
        {"dtype": _FP8},
    )
    for (attention, inputs), options in zip(rotated.examples(), forms, strict=True):
        yield _Coded(attention, **options), inputs
