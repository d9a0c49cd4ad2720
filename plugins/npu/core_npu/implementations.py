"""Which canonical ops the kernels of torch_npu implement, and the calls that each one takes."""

from __future__ import annotations

from core.common.ops.implementation import OpImplementation
from core_npu.ops import activation, attention, collective, linear, moe, norm, quantize, rotary

__all__ = ["IMPLEMENTATIONS"]

IMPLEMENTATIONS = tuple(
    OpImplementation(op=f"core::{name}", name=f"npu_{name}", fn=function, condition=condition)
    for name, function, condition in (
        ("rms_norm", norm.rms_norm, norm.rms_norm_condition),
        ("add_rms_norm", norm.add_rms_norm, norm.add_rms_norm_condition),
        ("add_rms_norm_quantize", norm.add_rms_norm_quantize, norm.add_rms_norm_quantize_condition),
        ("gated_activation", activation.gated_activation, activation.halves_condition),
        ("gated_activation_fused", activation.gated_activation_fused, activation.fused_condition),
        ("gated_activation_quantize", activation.gated_activation_quantize, activation.quantize_condition),
        ("rotary", rotary.rotary, rotary.rotary_condition),
        ("rotary_single", rotary.rotary_single, rotary.rotary_single_condition),
        ("qk_norm_rotary", rotary.qk_norm_rotary, rotary.qk_norm_rotary_condition),
        ("attention", attention.attention, attention.attention_condition),
        ("rotary_attention", attention.rotary_attention, attention.rotary_attention_condition),
        ("quantize", quantize.quantize, quantize.condition),
        ("quantize_asymmetric", quantize.quantize_asymmetric, quantize.asymmetric_condition),
        ("quantized_linear", linear.quantized_linear, linear.quantized_condition),
        ("weight_only_linear", linear.weight_only_linear, linear.weight_only_condition),
        ("moe_route", moe.moe_route, moe.moe_route_condition),
        ("grouped_mlp", moe.grouped_mlp, moe.grouped_mlp_condition),
        ("linear_reduce_scatter", collective.linear_reduce_scatter, collective.linear_condition),
        ("all_gather_linear", collective.all_gather_linear, collective.linear_condition),
    )
)
