"""Which canonical ops the plugin's kernels implement, and the calls that each one takes.

Imports Triton, and so is imported only where `kernels_missing` finds nothing to say.
"""

from __future__ import annotations

from core.common.ops.implementation import OpImplementation
from core_cuda.ops import activation, quantize
from core_cuda.ops.attention import paged as attention
from core_cuda.ops.conditions import all_of, code_dtype, code_regions, computes_in_fp32, dtypes
from core_cuda.ops.linear import products as linear
from core_cuda.ops.linear import quantized as quantized_linear
from core_cuda.ops.moe import grouped_mlp
from core_cuda.ops.moe import route as moe_route
from core_cuda.ops.norm import norms as norm
from core_cuda.ops.rotary import rotation as rotary
from core_cuda.ops.rotary import table as rotary_table
from core_cuda.ops.sampling import argmax
from core_cuda.ops.sampling import sample as sampling

__all__ = ["IMPLEMENTATIONS"]

IMPLEMENTATIONS = (
    OpImplementation(
        op="core::rms_norm",
        name="cuda_rms_norm",
        fn=norm.rms_norm,
        condition=all_of(dtypes, computes_in_fp32("x")),
    ),
    OpImplementation(
        op="core::add_rms_norm",
        name="cuda_add_rms_norm",
        fn=norm.add_rms_norm,
        condition=all_of(dtypes, computes_in_fp32("x", "residual")),
    ),
    OpImplementation(
        op="core::layer_norm",
        name="cuda_layer_norm",
        fn=norm.layer_norm,
        condition=all_of(dtypes, computes_in_fp32("x")),
    ),
    OpImplementation(
        op="core::gated_activation", name="cuda_gated_activation", fn=activation.gated_activation, condition=dtypes
    ),
    OpImplementation(
        op="core::gated_activation_fused",
        name="cuda_gated_activation_fused",
        fn=activation.gated_activation_fused,
        condition=dtypes,
    ),
    OpImplementation(op="core::rotary", name="cuda_rotary", fn=rotary.rotary, condition=rotary.refuses),
    OpImplementation(
        op="core::rotary_single", name="cuda_rotary_single", fn=rotary.rotary_single, condition=rotary.refuses
    ),
    OpImplementation(
        op="core::qk_norm_rotary", name="cuda_qk_norm_rotary", fn=rotary.qk_norm_rotary, condition=rotary.refuses
    ),
    OpImplementation(
        op="core::attention",
        name="cuda_attention",
        fn=attention.attention,
        condition=attention.attention_condition,
    ),
    OpImplementation(
        op="core::rotary_attention",
        name="cuda_rotary_attention",
        fn=attention.rotary_attention,
        condition=attention.rotary_attention_condition,
    ),
    OpImplementation(
        op="core::attention_quantize",
        name="cuda_attention_quantize",
        fn=attention.attention_quantize,
        condition=attention.quantize_condition(attention.attention_condition),
    ),
    OpImplementation(
        op="core::rotary_attention_quantize",
        name="cuda_rotary_attention_quantize",
        fn=attention.rotary_attention_quantize,
        condition=attention.quantize_condition(attention.rotary_attention_condition),
    ),
    OpImplementation(
        op="core::rotary_table",
        name="cuda_rotary_table",
        fn=rotary_table.rotary_table,
        condition=rotary_table.refuses,
    ),
    OpImplementation(op="core::linear", name="cuda_linear", fn=linear.linear, condition=linear.refuses),
    OpImplementation(
        op="core::gated_linear", name="cuda_gated_linear", fn=linear.gated_linear, condition=linear.refuses
    ),
    OpImplementation(
        op="core::moe_route", name="cuda_moe_route", fn=moe_route.moe_route, condition=moe_route.route_condition
    ),
    OpImplementation(
        op="core::grouped_mlp",
        name="cuda_grouped_mlp",
        fn=grouped_mlp.grouped_mlp,
        condition=grouped_mlp.grouped_mlp_condition,
    ),
    OpImplementation(op="core::sample", name="cuda_sample", fn=sampling.sample, condition=dtypes),
    OpImplementation(op="core::argmax", name="cuda_argmax", fn=argmax.argmax, condition=dtypes),
    OpImplementation(
        op="core::quantize", name="cuda_quantize", fn=quantize.quantize, condition=all_of(dtypes, code_dtype)
    ),
    OpImplementation(
        op="core::rms_norm_quantize",
        name="cuda_rms_norm_quantize",
        fn=norm.rms_norm_quantize,
        condition=all_of(dtypes, code_dtype, code_regions, computes_in_fp32("x")),
    ),
    OpImplementation(
        op="core::add_rms_norm_quantize",
        name="cuda_add_rms_norm_quantize",
        fn=norm.add_rms_norm_quantize,
        condition=all_of(dtypes, code_dtype, code_regions, computes_in_fp32("x", "residual")),
    ),
    OpImplementation(
        op="core::gated_activation_quantize",
        name="cuda_gated_activation_quantize",
        fn=activation.gated_activation_quantize,
        condition=all_of(dtypes, code_dtype, code_regions),
    ),
    OpImplementation(
        op="core::quantized_linear",
        name="cuda_quantized_linear",
        fn=quantized_linear.quantized_linear,
        condition=quantized_linear.refuses,
    ),
)
