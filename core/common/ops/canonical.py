"""All canonical ops: importing this module declares the whole vocabulary."""

from __future__ import annotations

from core.common.ops.attention.dense import DENSE_ATTENTION
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.collective.collectives import ALL_GATHER, ALL_REDUCE, LOCAL_SHARD, REDUCE_SCATTER
from core.common.ops.collective.linear import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from core.common.ops.collective.norm import (
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4,
    ALL_REDUCE_RMS_NORM,
)
from core.common.ops.declaration import CanonicalOp
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR
from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE
from core.common.ops.moe.experts import GROUPED_MLP, MOE_ROUTE
from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR
from core.common.ops.norm.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from core.common.ops.quantize.asymmetric import QUANTIZE_ASYMMETRIC
from core.common.ops.quantize.fp4 import QUANTIZE_FP4
from core.common.ops.quantize.symmetric import QUANTIZE, QUANTIZED_LINEAR
from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE
from core.common.ops.rotary.table import ROTARY_TABLE
from core.common.ops.sampling import ARGMAX, SAMPLE

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
