"""Random arguments of the canonical ops: shapes, layouts and options that no sample covers; one strategy per op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from core_conformance.fuzzing import attention, layers, pointwise, quantized, recurrent
from core_conformance.fuzzing.source import Source

CALLS: Mapping[str, Callable[[Source], dict[str, Any]]] = MappingProxyType(
    {
        "core::attention": attention.attention,
        "core::dense_attention": attention.dense_attention,
        "core::rms_norm": pointwise.rms_norm,
        "core::add_rms_norm": pointwise.add_rms_norm,
        "core::layer_norm": pointwise.layer_norm,
        "core::gated_activation": pointwise.gated_activation,
        "core::gated_activation_fused": pointwise.gated_activation_fused,
        "core::rotary": pointwise.rotary,
        "core::rotary_single": pointwise.rotary_single,
        "core::qk_norm_rotary": pointwise.qk_norm_rotary,
        "core::rotary_attention": layers.rotary_attention,
        "core::attention_quantize": lambda source: layers.attended_quantize(source, attention.attention(source)),
        "core::rotary_attention_quantize": lambda source: layers.attended_quantize(
            source, layers.rotary_attention(source)
        ),
        "core::rotary_table": pointwise.rotary_table,
        "core::linear": layers.linear,
        "core::gated_linear": layers.gated_linear,
        "core::add_lora": layers.add_lora,
        "core::moe_route": quantized.moe_route,
        "core::grouped_mlp": quantized.grouped_mlp,
        "core::quantize": quantized.quantize,
        "core::quantized_linear": quantized.quantized_linear,
        "core::quantize_asymmetric": quantized.quantize_asymmetric,
        "core::weight_only_linear": quantized.weight_only_linear,
        "core::quantized_grouped_linear": quantized.quantized_grouped_linear,
        "core::quantize_fp4": layers.quantize_fp4,
        "core::rms_norm_quantize": layers.quantized(pointwise.rms_norm),
        "core::add_rms_norm_quantize": layers.quantized(pointwise.add_rms_norm),
        "core::gated_activation_quantize": layers.gated_activation_quantize,
        "core::causal_conv1d_update": recurrent.convolution,
        "core::gated_delta_rule": recurrent.delta_rule,
        "core::selective_state_update": recurrent.state_space,
        "core::sample": quantized.sample,
        "core::argmax": quantized.argmax,
    }
)
"""Op -> the function that draws one call of it. Left out: collectives, which need more than one process."""
