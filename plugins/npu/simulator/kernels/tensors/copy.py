"""Kernels that copy, fill, cast and make values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.formulas import both, in_place, stored
from simulator.marshal import kernel

in_place(
    {
        "Copy": ("TT", lambda destination, source: source),
        "Zero": ("T", torch.zeros_like),
        "One": ("T", torch.ones_like),
        "FillScalar": ("TS", torch.full_like),
        "FillTensor": ("TT", lambda x, value: value.reshape(())),
        "FillDiagonal": ("TSb", lambda x, value, wrap: x.fill_diagonal_(value, wrap)),
    }
)
both({"Triu": ("TIT", torch.triu), "Tril": ("TIT", torch.tril)})
stored({"Cast": ("TiT", lambda x, dtype: x)})
stored({"Arange": ("SSST", torch.arange), "Linspace": ("SSIT", torch.linspace), "Eye": ("IIT", torch.eye)}, typed=True)


@kernel("aclnnRange", "SSST")
def _range(start: Any, end: Any, step: Any, out: Tensor) -> None:
    # Inclusive of its end, as torch.range; torch_npu gives the number of elements with the output.
    out.copy_(start + step * torch.arange(out.numel(), dtype=out.dtype))
