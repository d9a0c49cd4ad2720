"""Random calls of the ops that end in codes: those of the op before, with every form of codes."""

from __future__ import annotations

from typing import Any

from core.common.ops.arguments import at_least_fp32
from core.common.ops.quantize.symmetric import GRANULARITIES, RANGES
from core_conformance.fuzzing import attention, layers, pointwise
from core_conformance.fuzzing.source import Source


def rms_norm_quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::rms_norm_quantize."""
    call = pointwise.rms_norm(source)
    return call | _codes(source, tuple(call["x"].shape))


def add_rms_norm_quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::add_rms_norm_quantize."""
    call = pointwise.add_rms_norm(source)
    return call | _codes(source, tuple(call["x"].shape))


def gated_activation_quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::gated_activation_quantize, gate and up in one tensor and in two."""
    if source.one_of(False, True):
        call = pointwise.gated_activation(source)
        return call | _codes(source, tuple(call["gate"].shape))
    call = pointwise.gated_activation_fused(source)
    whole = call.pop("gate_up")
    return call | {"gate": whole, "up": None} | _codes(source, (*whole.shape[:-1], whole.shape[-1] // 2))


def attention_quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::attention_quantize."""
    return _coded(source, attention.attention(source))


def rotary_attention_quantize(source: Source) -> dict[str, Any]:
    """Draw a call of core::rotary_attention_quantize."""
    return _coded(source, layers.rotary_attention(source))


def _coded(source: Source, call: dict[str, Any]) -> dict[str, Any]:
    """Add what quantisation of an attention's rows is told, which has no groups."""
    granularity = source.one_of("tensor", "token")
    regions = () if granularity == "tensor" else (call["query"].shape[0], 1)
    scale = source.dense(*regions, scale=0.001, shift=0.01, dtype=at_least_fp32(source.dtype))
    given = {"out_scale": source.one_of(None, scale), "dtype": source.one_of(*RANGES), "granularity": granularity}
    return call | given


def _codes(source: Source, shape: tuple[int, ...]) -> dict[str, Any]:
    """Draw what quantisation of values of this shape is told; groups of any size that divides a row."""
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
