"""Calls of the experts of quantised mixtures, sizes of Qwen3-30B-A3B and DeepSeek-V3, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from core_cuda.ops.moe.quantized_grouped import quantized_grouped_linear

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
SIZES = {"qwen3": (128, 1536, 2048), "deepseek": (32, 4096, 7168)}
"""Experts, columns and depth."""
FORMATS: dict[str, tuple[torch.dtype, torch.dtype, int, bool]] = {
    "fp8 codes": (FP8, FP8, 0, False),
    "fp8 codes, blocks": (FP8, FP8, 128, False),
    "weights in fp8 codes": (BF16, FP8, 0, False),
    "int8": (INT8, INT8, 0, False),
    "int8, zero points": (INT8, INT8, 0, True),
    "weights in int8": (BF16, INT8, 0, False),
    "weights in int4": (BF16, torch.int32, 128, False),
    "weights in int4, zero points": (BF16, torch.int32, 32, True),
}
"""Dtypes of x and of the weight, inputs that share a scale, and whether there are zero points."""


def call(rows: int, size: str, name: str) -> Callable[[], object]:
    """Return a call on tensors that nobody reads or writes, so that they take no memory."""
    experts, columns, depth = SIZES[size]
    x, weight, group, zero = FORMATS[name]
    packed, scales = weight == torch.int32, torch.empty(experts, columns, depth // group if group else 1)
    options: dict[str, Any] = {"out_dtype": BF16, "num_bits": 4 if packed else 8}
    if zero and x == INT8:
        options["x_zero_point"] = torch.empty(rows, 1, dtype=INT8)
    operands = (
        torch.empty(rows, depth, dtype=x),
        None if x == BF16 else torch.empty(rows, 1),
        torch.empty(experts, dtype=torch.int32),
        torch.empty(experts, columns, depth // 8 if packed else depth, dtype=weight),
        scales,
        torch.empty(scales.shape, dtype=INT8) if zero else None,
    )
    return partial(quantized_grouped_linear, *operands, **options)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield products with few and with many rows."""
    for size in SIZES:
        for rows in (8, 512, 2048, 32768):
            for name in FORMATS:
                yield f"{size} {rows} experts, {name}", call(rows, size, name)
