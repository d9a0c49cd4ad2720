"""Which canonical ops the plugin's kernels implement, and the calls that each one takes.

Imports Triton, so it is imported only if `kernels_missing` returns "".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.common.ops.implementation import Condition, OpImplementation, always
from core_cuda.ops import activation, quantize
from core_cuda.ops.alike import attention as alike_attention
from core_cuda.ops.alike import linear as alike_linear
from core_cuda.ops.alike import norms as alike_norms
from core_cuda.ops.attention import paged as attention
from core_cuda.ops.conditions import all_of, code_dtype, code_regions, computes_in_fp32, dtypes
from core_cuda.ops.linear import lora, weight_only
from core_cuda.ops.linear import products as linear
from core_cuda.ops.linear import quantized as quantized_linear
from core_cuda.ops.moe import grouped_mlp, quantized_grouped
from core_cuda.ops.moe import route as moe_route
from core_cuda.ops.norm import norms as norm
from core_cuda.ops.recurrent import convolution, delta_rule, state_space
from core_cuda.ops.recurrent import states as recurrent
from core_cuda.ops.registration import OP_OF
from core_cuda.ops.rotary import rotation as rotary
from core_cuda.ops.rotary import table as rotary_table
from core_cuda.ops.sampling import argmax
from core_cuda.ops.sampling import sample as sampling

_CONDITIONS: Mapping[torch._ops.OpOverload, Condition] = {
    norm.rms_norm: all_of(dtypes, computes_in_fp32("x")),
    norm.add_rms_norm: all_of(dtypes, computes_in_fp32("x", "residual")),
    norm.layer_norm: all_of(dtypes, computes_in_fp32("x")),
    activation.gated_activation: dtypes,
    activation.gated_activation_fused: dtypes,
    rotary.rotary: rotary.why_not,
    rotary.rotary_single: rotary.why_not,
    rotary.qk_norm_rotary: rotary.why_not,
    attention.attention: attention.attention_condition,
    attention.rotary_attention: attention.rotary_attention_condition,
    attention.attention_quantize: attention.quantize_condition(attention.attention_condition),
    attention.rotary_attention_quantize: attention.quantize_condition(attention.rotary_attention_condition),
    rotary_table.rotary_table: rotary_table.why_not,
    linear.linear: linear.why_not,
    linear.linear_other: linear.why_not,
    linear.gated_linear: linear.why_not,
    linear.gated_linear_other: linear.why_not,
    lora.add_lora: lora.why_not,
    moe_route.moe_route: moe_route.route_condition,
    grouped_mlp.grouped_mlp: grouped_mlp.grouped_mlp_condition,
    convolution.causal_conv1d_update: recurrent.why_not,
    delta_rule.gated_delta_rule: delta_rule.why_not,
    state_space.selective_state_update: state_space.why_not,
    sampling.sample: dtypes,
    argmax.argmax: dtypes,
    quantize.quantize: all_of(dtypes, code_dtype),
    norm.rms_norm_quantize: all_of(dtypes, code_dtype, code_regions, computes_in_fp32("x")),
    norm.add_rms_norm_quantize: all_of(dtypes, code_dtype, code_regions, computes_in_fp32("x", "residual")),
    activation.gated_activation_quantize: all_of(dtypes, code_dtype, code_regions),
    quantized_linear.quantized_linear_early: quantized_linear.why_not_early,
    quantized_linear.quantized_linear: quantized_linear.why_not,
    quantized_linear.quantized_linear_library: quantized_linear.why_not_library,
    quantized_linear.quantized_linear_fast: quantized_linear.why_not_fast,
    quantized_grouped.quantized_grouped_linear: quantized_grouped.why_not,
    weight_only.weight_only_linear_early: weight_only.why_not_early,
    weight_only.weight_only_linear: weight_only.why_not,
    weight_only.weight_only_linear_other: weight_only.why_not,
}
"""Kernels, the preferred one of an op first, and the calls that each one takes."""

_ALIKE: Mapping[torch._ops.OpOverload, Condition] = {
    alike_linear.linear_alike: alike_linear.why_not,
    alike_attention.attention_alike: alike_attention.why_not,
    alike_attention.rotary_attention_alike: alike_attention.rotary_condition,
    alike_norms.rms_norm_alike: all_of(_CONDITIONS[norm.rms_norm], alike_norms.width_condition),
    alike_norms.add_rms_norm_alike: all_of(_CONDITIONS[norm.add_rms_norm], alike_norms.width_condition),
    alike_norms.layer_norm_alike: all_of(_CONDITIONS[norm.layer_norm], alike_norms.width_condition),
    grouped_mlp.grouped_mlp_alike: grouped_mlp.grouped_mlp_condition,
}
"""Kernels whose sums of a row have one order whatever other rows there are, for `deterministic="batch"`: others are
faster."""

_ALIKE_TOO = frozenset(
    {
        *(activation.gated_activation, activation.gated_activation_fused),
        *(rotary.rotary, rotary.rotary_single, rotary_table.rotary_table),
        *(moe_route.moe_route, sampling.sample, argmax.argmax),
    }
)
"""Kernels that are so by themselves: they compute each number from its own operands, or a row by one program whatever
their number, or choose a token by sums of integers."""

_TIMED: Mapping[torch._ops.OpOverload, Condition] = {
    linear.linear_other: linear.other_timed,
    linear.gated_linear_other: linear.other_timed,
    quantized_linear.quantized_linear: quantized_linear.late_timed,
    quantized_linear.quantized_linear_library: quantized_linear.library_timed,
    weight_only.weight_only_linear: weight_only.late_timed,
    weight_only.weight_only_linear_other: weight_only.other_timed,
}
"""Which calls further kernels of an op are timed for."""

_SLACK = {quantized_linear.quantized_linear_fast: quantized_linear.FAST_SLACK}
"""Kernels that give accuracy up, and how wide the bounds are by which they are judged."""

IMPLEMENTATIONS = tuple(
    OpImplementation(
        op=OP_OF[kernel],
        name=f"cuda_{kernel._opname}",
        fn=kernel,
        condition=condition,
        timed=_TIMED.get(kernel, always),
        slack=_SLACK.get(kernel, 1.0),
        batch_invariant=kernel in _ALIKE_TOO or kernel in _ALIKE,
        on_request=kernel in _ALIKE,
    )
    for kernel, condition in (*_CONDITIONS.items(), *_ALIKE.items())
)
