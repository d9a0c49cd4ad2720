"""Random calls of the ops of quantised layers: zero points, weights alone, experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.quantize.symmetric import RANGES
from core_conformance.fuzzing.source import Source


def quantize_asymmetric(source: Source) -> dict[str, Any]:
    """Draw a call of core::quantize_asymmetric: one-sided values, rows of zeros, values beyond the scale's range."""
    granularity = source.one_of("token", "tensor")
    leading = source.shape(most_ranks=2)
    x = source.tensor(*leading, source.integer(1, 64), scale=source.one_of(1.0, 30.0), shift=source.one_of(0.0, 20.0))
    if source.one_of(False, True):
        x[:1] = 0
    regions = () if granularity == "tensor" else (*leading, 1)
    given = source.one_of(False, True)
    return {
        "x": x,
        "scale": scale(source, *regions) if given else None,
        "zero_point": codes(source, torch.int8, *regions) if given else None,
        "dtype": torch.int8,
        "granularity": granularity,
    }


def weight_only_linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::weight_only_linear, of every format, by row and by group."""
    outputs = source.integer(1, 40)
    weight, inputs = _weight(source, outputs)
    x = source.tensor(*source.shape(most_ranks=2), inputs)
    return {"x": x, **weight, "bias": source.maybe(outputs)}


def quantized_grouped_linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::quantized_grouped_linear: codes or values, experts without rows, rows of no expert."""
    experts = source.integer(1, 5)
    counts = [source.integer(0, 6) for _ in range(experts)]
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(source.device)
    rows = sum(counts) + source.integer(0, 2)
    weight, inputs = _weight(source, experts, source.integer(1, 40))
    call: dict[str, Any] = {**weight, "ends": ends, "out_dtype": source.dtype, "x_scale": None, "x_zero_point": None}
    if weight["num_bits"] == 4 or source.one_of(False, True):
        return call | {"x": source.tensor(rows, inputs)}
    code = weight["w_codes"].dtype
    regions = source.one_of((rows, 1), ())
    zero_point = code == torch.int8 and source.one_of(False, True)
    return call | {
        "x": codes(source, code, rows, inputs),
        "x_scale": scale(source, *regions),
        "x_zero_point": codes(source, torch.int8, *regions) if zero_point else None,
    }


def _weight(source: Source, *shape: int) -> tuple[dict[str, Any], int]:
    """Draw a quantised weight (*shape, inputs); return its arguments and the inputs."""
    groups, num_bits = source.integer(1, 4), source.one_of(8, 4)
    inputs = groups * source.one_of(8, 12, 16)
    code = torch.int8 if num_bits == 4 else source.one_of(*RANGES)
    held = codes(source, code, *shape, inputs)
    if num_bits == 4:
        held = (source.dense(*shape, -(-inputs // 8), dtype=torch.float64) * 2**29).to(torch.int32)
    regions = (*shape, source.one_of(1, groups))
    zero_point = code == torch.int8 and source.one_of(False, True)
    return {
        "w_codes": held,
        "w_scale": scale(source, *regions),
        "w_zero_point": codes(source, torch.int8, *regions) if zero_point else None,
        "num_bits": num_bits,
    }, inputs


def codes(source: Source, dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw codes of this dtype."""
    low, high = RANGES[dtype]
    return source.dense(*shape, scale=40.0, dtype=torch.float32).clamp(low, high).to(dtype)


def scale(source: Source, *shape: int) -> Tensor:
    """Draw positive scales."""
    return source.dense(*shape, scale=0.002, shift=0.01, dtype=at_least_fp32(source.dtype))
