"""Which canonical ops the kernels of torch_npu implement, and the calls that each one takes."""

from __future__ import annotations

from core.common.ops.implementation import OpImplementation
from core_npu.ops import activation, attention, linear, moe, norm, quantize, rotary

__all__ = ["IMPLEMENTATIONS"]

IMPLEMENTATIONS = (
    OpImplementation(op="core::rms_norm", name="npu_rms_norm", fn=norm.rms_norm, condition=norm.rms_norm_condition),
    OpImplementation(
        op="core::add_rms_norm",
        name="npu_add_rms_norm",
        fn=norm.add_rms_norm,
        condition=norm.add_rms_norm_condition,
    ),
    OpImplementation(
        op="core::add_rms_norm_quantize",
        name="npu_add_rms_norm_quantize",
        fn=norm.add_rms_norm_quantize,
        condition=norm.add_rms_norm_quantize_condition,
    ),
    OpImplementation(
        op="core::gated_activation",
        name="npu_gated_activation",
        fn=activation.gated_activation,
        condition=activation.halves_condition,
    ),
    OpImplementation(
        op="core::gated_activation_fused",
        name="npu_gated_activation_fused",
        fn=activation.gated_activation_fused,
        condition=activation.fused_condition,
    ),
    OpImplementation(
        op="core::gated_activation_quantize",
        name="npu_gated_activation_quantize",
        fn=activation.gated_activation_quantize,
        condition=activation.quantize_condition,
    ),
    OpImplementation(op="core::rotary", name="npu_rotary", fn=rotary.rotary, condition=rotary.rotary_condition),
    OpImplementation(
        op="core::rotary_single",
        name="npu_rotary_single",
        fn=rotary.rotary_single,
        condition=rotary.rotary_single_condition,
    ),
    OpImplementation(
        op="core::qk_norm_rotary",
        name="npu_qk_norm_rotary",
        fn=rotary.qk_norm_rotary,
        condition=rotary.qk_norm_rotary_condition,
    ),
    OpImplementation(
        op="core::attention",
        name="npu_attention",
        fn=attention.attention,
        condition=attention.attention_condition,
    ),
    OpImplementation(
        op="core::rotary_attention",
        name="npu_rotary_attention",
        fn=attention.rotary_attention,
        condition=attention.rotary_attention_condition,
    ),
    OpImplementation(op="core::quantize", name="npu_quantize", fn=quantize.quantize, condition=quantize.condition),
    OpImplementation(
        op="core::quantize_asymmetric",
        name="npu_quantize_asymmetric",
        fn=quantize.quantize_asymmetric,
        condition=quantize.asymmetric_condition,
    ),
    OpImplementation(
        op="core::quantized_linear",
        name="npu_quantized_linear",
        fn=linear.quantized_linear,
        condition=linear.quantized_condition,
    ),
    OpImplementation(
        op="core::weight_only_linear",
        name="npu_weight_only_linear",
        fn=linear.weight_only_linear,
        condition=linear.weight_only_condition,
    ),
    OpImplementation(op="core::moe_route", name="npu_moe_route", fn=moe.moe_route, condition=moe.moe_route_condition),
    OpImplementation(
        op="core::grouped_mlp",
        name="npu_grouped_mlp",
        fn=moe.grouped_mlp,
        condition=moe.grouped_mlp_condition,
    ),
)
