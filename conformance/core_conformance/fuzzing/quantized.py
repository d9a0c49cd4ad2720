"""Random calls of quantisation, quantised linears, mixtures of experts and samplers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.mlp.activation import ACTIVATIONS
from core.common.ops.moe.route import SCORINGS
from core.common.ops.quantize.symmetric import GRANULARITIES, RANGES
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


def quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::quantize: with a scale and without, rows of zeros, values beyond the scale's range."""
    granularity, group = source.one_of(*GRANULARITIES), source.one_of(8, 16)
    leading, width = source.sized(tuple(group * count for count in range(1, 9)), most_ranks=2)
    num_groups = width // group
    x = source.tensor(*leading, width, scale=source.one_of(1.0, 30.0))
    if source.one_of(False, True):
        x[:1] = 0
    regions = {"tensor": (), "token": (*leading, 1), "group": (*leading, num_groups)}[granularity]
    scale = source.dense(*regions, scale=0.002, shift=0.01, dtype=at_least_fp32(source.dtype))
    return {
        "x": x,
        "scale": source.one_of(None, scale),
        "dtype": source.one_of(*RANGES),
        "granularity": granularity,
        "group_size": group if granularity == "group" else 0,
    }


def quantized_linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::quantized_linear, with scales of any granularity and zero points."""
    num_groups, outputs = source.integer(1, 4), source.integer(1, 40)
    leading, width, code = source.shape(most_ranks=2), 16 * num_groups, source.one_of(*RANGES)
    x_scale = source.one_of((*leading, 1), (), (*leading, num_groups))
    w_scale = source.one_of((outputs, 1), (), (outputs, num_groups))
    zeros = {
        name: codes(source, torch.int8, *shape) if code == torch.int8 and source.one_of(False, True) else None
        for name, shape in (("x_zero_point", x_scale), ("w_zero_point", w_scale))
    }
    return {
        "x_codes": codes(source, code, *leading, width),
        "x_scale": scale(source, *x_scale),
        "w_codes": codes(source, code, outputs, width),
        "w_scale": scale(source, *w_scale),
        "bias": source.maybe(outputs),
        "out_dtype": source.dtype,
        **zeros,
    }


def moe_route(source: Source) -> dict[str, Any]:
    """Draw a call of core::moe_route, with groups of experts and without."""
    groups = source.one_of(0, 2, 4)
    experts = (groups or 1) * source.integer(2, 8)
    top_groups = source.integer(1, groups) if groups else 0
    reachable = experts // groups * top_groups if groups else experts
    wide = at_least_fp32(source.dtype)
    return {
        "logits": source.tensor(source.integer(0, 40), experts, scale=2.0),
        "top_k": source.integer(1, reachable),
        "scoring": source.one_of(*SCORINGS),
        "bias": source.maybe(experts, scale=0.1, dtype=wide),
        "renormalize": source.one_of(False, True),
        "renormalize_eps": source.one_of(0.0, 1e-20),
        "scale": source.one_of(1.0, 2.5),
        "num_groups": groups,
        "top_groups": top_groups,
        "scored_per_group": source.integer(1, min(2, experts // groups)) if groups else 2,
        "sorted": source.one_of(True, False),
        "compute_dtype": source.one_of(None, wide),
        "out_dtype": source.one_of(None, source.dtype, wide),
    }


def grouped_mlp(source: Source) -> dict[str, Any]:
    """Draw a call of core::grouped_mlp, experts without tokens and without a gate included."""
    tokens, experts, top_k = source.integer(0, 12), source.integer(2, 6), source.integer(1, 2)
    hidden, inner = 8 * source.integer(1, 6), 8 * source.integer(1, 6)
    transposed, gated = (source.one_of(False, True) for _ in range(2))
    width = 2 * inner if gated else inner
    gate_up, down = (
        source.tensor(experts, *(shape[::-1] if transposed else shape), scale=shape[1] ** -0.5)
        for shape in ((width, hidden), (hidden, inner))
    )
    ranks = torch.stack([source.order(experts) for _ in range(tokens)]) if tokens else torch.empty(0, experts).long()
    # Of an expert that lies elsewhere: -1 names none of these.
    indices = ranks[:, :top_k] - source.one_of(0, 1)
    return {
        "x": source.tensor(tokens, hidden),
        "weights": source.tensor(tokens, top_k, scale=0.2, shift=0.5),
        "indices": indices.to(source.device),
        "gate_up": gate_up,
        "down": down,
        "kind": source.one_of(*ACTIVATIONS),
        "gated": gated,
        "transposed": transposed,
        "interleaved": gated and source.one_of(False, True),
        "limit": source.one_of(0.0, 7.0) if gated else 0.0,
        "up_offset": source.one_of(0.0, 1.0) if gated else 0.0,
        "gate_up_bias": source.maybe(experts, width),
        "down_bias": source.maybe(experts, hidden),
    }


def sample(source: Source) -> dict[str, Any]:
    """Draw a call of core::sample, each row with limits of its own."""
    rows, vocabulary = source.integer(0, 9), source.integer(1, 70)
    limits = [
        (source.one_of(0.0, 0.7, 1.5), source.one_of(0.0, 1.0, 7.0), source.one_of(1.0, 0.4, 0.9)) for _ in range(rows)
    ]
    drawn = torch.special.ndtr(source.dense(rows, dtype=torch.float32).cpu()).tolist()
    params = [(*limit, uniform) for limit, uniform in zip(limits, drawn, strict=True)]
    logits = source.tensor(rows, vocabulary, scale=2.0)
    return {
        "logits": logits,
        "sampling_params": torch.tensor(params, dtype=torch.float32).view(rows, 4).to(source.device),
    }


def argmax(source: Source) -> dict[str, Any]:
    """Draw a call of core::argmax, with equal logits and without."""
    logits = source.tensor(source.integer(0, 9), source.integer(1, 3000), scale=2.0)
    return {"logits": logits.round() if source.one_of(False, True) else logits}
