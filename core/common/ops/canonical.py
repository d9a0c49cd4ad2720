"""All canonical ops: importing this module declares the whole vocabulary."""

from __future__ import annotations

from core.common.ops.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.activation_quantized import GATED_ACTIVATION_QUANTIZE
from core.common.ops.attention import ATTENTION
from core.common.ops.attention_quantize import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.collective import ALL_GATHER, ALL_REDUCE, LOCAL_SHARD, REDUCE_SCATTER
from core.common.ops.collective_linear import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from core.common.ops.collective_norm import (
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4,
    ALL_REDUCE_RMS_NORM,
)
from core.common.ops.declaration import CanonicalOp
from core.common.ops.dense_attention import DENSE_ATTENTION
from core.common.ops.linear import GATED_LINEAR, LINEAR
from core.common.ops.moe import GROUPED_MLP, MOE_ROUTE
from core.common.ops.normalization import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.normalization_quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from core.common.ops.quantization import QUANTIZE, QUANTIZED_LINEAR
from core.common.ops.quantization_asymmetric import QUANTIZE_ASYMMETRIC
from core.common.ops.quantize_fp4 import QUANTIZE_FP4
from core.common.ops.quantized_experts import QUANTIZED_GROUPED_LINEAR
from core.common.ops.rotary import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE
from core.common.ops.rotary_attention import ROTARY_ATTENTION
from core.common.ops.rotary_table import ROTARY_TABLE
from core.common.ops.sampling import ARGMAX, SAMPLE
from core.common.ops.weight_only import WEIGHT_ONLY_LINEAR

OPS: tuple[CanonicalOp, ...] = (
    ATTENTION,
    DENSE_ATTENTION,
    RMS_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    GATED_ACTIVATION,
    GATED_ACTIVATION_FUSED,
    ROTARY,
    ROTARY_SINGLE,
    QK_NORM_ROTARY,
    ROTARY_ATTENTION,
    ROTARY_TABLE,
    LINEAR,
    GATED_LINEAR,
    MOE_ROUTE,
    GROUPED_MLP,
    QUANTIZE,
    QUANTIZED_LINEAR,
    QUANTIZE_ASYMMETRIC,
    WEIGHT_ONLY_LINEAR,
    QUANTIZED_GROUPED_LINEAR,
    QUANTIZE_FP4,
    RMS_NORM_QUANTIZE,
    ADD_RMS_NORM_QUANTIZE,
    GATED_ACTIVATION_QUANTIZE,
    ATTENTION_QUANTIZE,
    ROTARY_ATTENTION_QUANTIZE,
    SAMPLE,
    ARGMAX,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    LOCAL_SHARD,
    ALL_REDUCE_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4,
    ALL_GATHER_LINEAR,
    LINEAR_REDUCE_SCATTER,
)
