"""Random calls of fused ops: rotation with attention, linears with a gate, ops that end in a quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.mlp.activation import ACTIVATIONS
from core.common.ops.quantize.symmetric import GRANULARITIES, RANGES
from core.common.ops.rotary.rotation import STYLES
from core_conformance.fuzzing import pointwise
from core_conformance.fuzzing.attention import attention
from core_conformance.fuzzing.source import WIDE, WIDTHS, Source

_NARROW = (*[True] * 10, False)
"""Whether a linear is of usual size, mostly."""


def rotary_attention(source: Source) -> dict[str, Any]:
    """Draw a call of core::rotary_attention: one of core::attention, causal, without a mask, with or without norms."""
    call, wide = attention(source), at_least_fp32(source.dtype)
    del call["mask"], call["causal"]
    num_tokens, _, size = call["query"].shape
    rotated = source.one_of(size, size // 2)
    width, dtype = source.one_of(rotated, rotated // 2), source.one_of(source.dtype, wide)
    angles = source.dense(num_tokens, width, dtype=torch.float64, scale=3.0)
    options: dict[str, Any] = {
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "style": source.one_of(*STYLES),
        "rotary_dim": 0 if rotated == size else rotated,
        "compute_dtype": source.one_of(None, wide),
        "out_dtype": source.one_of(None, source.dtype),
    }
    norms = (
        {"normalize": True, **pointwise.head_norms(source, size)}
        if source.one_of(False, True)
        else {"normalize": False}
    )
    return {**call, **options, **norms}


def linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::linear."""
    if source.one_of(*_NARROW):
        return _linear(source, source.one_of(*WIDTHS))
    # Either is past 8,192, and not both: the weight of such a call would hold 2**26 numbers.
    width, outputs = source.one_of((WIDE[0], 40), (40, WIDE[0]))
    return _linear(source, outputs, width)


def gated_linear(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_linear, gate and up in every order."""
    return {
        **_linear(source, 2 * source.one_of(*WIDTHS[:-2])),
        "kind": source.one_of(*ACTIVATIONS),
        "gate_first": source.one_of(True, False),
        "interleaved": source.one_of(False, True),
        "limit": source.one_of(0.0, 7.0, 0.5),
        "up_offset": source.one_of(0.0, 1.0),
    }


def add_lora(source: Source) -> dict[str, Any]:
    """Draw a call of core::add_lora: one layer or several, rows of any slot, of none, and of numbers of no slot."""
    leading, width = source.shape(), source.one_of(*WIDTHS)
    sizes = [source.one_of(*WIDTHS) for _ in range(source.integer(1, 3))]
    num_slots, rank = source.integer(1, 4), source.integer(1, 20)
    numbers = source.dense(torch.Size(leading).numel(), dtype=torch.float64, scale=2.0)
    return {
        "base": source.tensor(*leading, sum(sizes)),
        "x": source.tensor(*leading, width),
        "a": source.tensor(len(sizes) * num_slots * rank, width, scale=width**-0.5),
        "b": source.tensor(sum(sizes), num_slots * rank, scale=rank**-0.5),
        "slots": numbers.round().to(torch.int64),
        "rank": rank,
        "sizes": sizes,
    }


def _linear(source: Source, outputs: int, width: int = 0) -> dict[str, Any]:
    width = width or source.one_of(*WIDTHS)
    weight: Tensor = source.tensor(outputs, width, scale=width**-0.5)
    return {"x": source.tensor(*source.shape(), width), "weight": weight, "bias": source.maybe(outputs)}


def quantized(draw: Callable[[Source], dict[str, Any]]) -> Callable[[Source], dict[str, Any]]:
    """Return the strategy of an op that ends in a quantisation. draw: the strategy of the op before, which has rows
    `x`."""

    def drawn(source: Source) -> dict[str, Any]:
        call = draw(source)
        return call | _codes(source, tuple(call["x"].shape))

    return drawn


def gated_activation_quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_activation_quantize, gate and up in one tensor and in two."""
    if source.one_of(False, True):
        call = pointwise.gated_activation(source)
        return call | _codes(source, tuple(call["gate"].shape))
    call = pointwise.gated_activation_fused(source)
    whole = call.pop("gate_up")
    return call | {"gate": whole, "up": None} | _codes(source, (*whole.shape[:-1], whole.shape[-1] // 2))


def attended_quantize(source: Source, call: dict[str, Any]) -> dict[str, Any]:
    """Add the arguments for quantising the rows, by tensor or by token, to a call of attention."""
    granularity = source.one_of("tensor", "token")
    regions = () if granularity == "tensor" else (call["query"].shape[0], 1)
    scale = source.dense(*regions, scale=0.001, shift=0.01, dtype=at_least_fp32(source.dtype))
    given = {"out_scale": source.one_of(None, scale), "dtype": source.one_of(*RANGES), "granularity": granularity}
    return call | given


def _codes(source: Source, shape: tuple[int, ...]) -> dict[str, Any]:
    """Draw the quantisation arguments for values of this shape; groups of any size that divides a row."""
    granularity, width = source.one_of(*GRANULARITIES), shape[-1]
    group = source.one_of(*(size for size in (1, 2, 3, 8, 10, 16, 64) if width % size == 0))
    regions = {"tensor": (), "token": (*shape[:-1], 1), "group": (*shape[:-1], width // group)}[granularity]
    scale = source.dense(*regions, scale=0.002, shift=0.02, dtype=at_least_fp32(source.dtype))
    return {
        "scale": source.one_of(None, scale),
        "dtype": source.one_of(*RANGES),
        "granularity": granularity,
        "group_size": group if granularity == "group" else 0,
    }


def quantize_fp4(source: Source) -> dict[str, Any]:
    """Draw a call of core::quantize_fp4: with a scale and without, rows of zeros, values beyond the scale's range."""
    x = source.tensor(*source.shape(most_ranks=2), 16 * source.integer(1, 8), scale=source.one_of(1.0, 30.0))
    if source.one_of(False, True):
        x[:1] = 0
    scale = source.dense(scale=0.0002, shift=0.002, dtype=at_least_fp32(source.dtype))
    return {"x": x, "scale": source.one_of(None, scale)}
