"""All canonical ops: importing this module declares the whole vocabulary. A pass across families imports from here."""

from __future__ import annotations

from core.common.ops.attention import ATTENTION as ATTENTION
from core.common.ops.attention import ATTENTION_QUANTIZE as ATTENTION_QUANTIZE
from core.common.ops.attention import DENSE_ATTENTION as DENSE_ATTENTION
from core.common.ops.attention import ROTARY_ATTENTION as ROTARY_ATTENTION
from core.common.ops.attention import ROTARY_ATTENTION_QUANTIZE as ROTARY_ATTENTION_QUANTIZE
from core.common.ops.collective import ALL_GATHER as ALL_GATHER
from core.common.ops.collective import ALL_GATHER_LINEAR as ALL_GATHER_LINEAR
from core.common.ops.collective import ALL_REDUCE as ALL_REDUCE
from core.common.ops.collective import ALL_REDUCE_ADD_RMS_NORM as ALL_REDUCE_ADD_RMS_NORM
from core.common.ops.collective import ALL_REDUCE_ADD_RMS_NORM_QUANTIZE as ALL_REDUCE_ADD_RMS_NORM_QUANTIZE
from core.common.ops.collective import ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4 as ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4
from core.common.ops.collective import ALL_REDUCE_RMS_NORM as ALL_REDUCE_RMS_NORM
from core.common.ops.collective import LINEAR_REDUCE_SCATTER as LINEAR_REDUCE_SCATTER
from core.common.ops.collective import LOCAL_SHARD as LOCAL_SHARD
from core.common.ops.collective import REDUCE_SCATTER as REDUCE_SCATTER
from core.common.ops.declaration import CanonicalOp
from core.common.ops.linear import GATED_LINEAR as GATED_LINEAR
from core.common.ops.linear import LINEAR as LINEAR
from core.common.ops.linear import WEIGHT_ONLY_LINEAR as WEIGHT_ONLY_LINEAR
from core.common.ops.mlp import GATED_ACTIVATION as GATED_ACTIVATION
from core.common.ops.mlp import GATED_ACTIVATION_FUSED as GATED_ACTIVATION_FUSED
from core.common.ops.mlp import GATED_ACTIVATION_QUANTIZE as GATED_ACTIVATION_QUANTIZE
from core.common.ops.moe import GROUPED_MLP as GROUPED_MLP
from core.common.ops.moe import MOE_ROUTE as MOE_ROUTE
from core.common.ops.moe import QUANTIZED_GROUPED_LINEAR as QUANTIZED_GROUPED_LINEAR
from core.common.ops.norm import ADD_RMS_NORM as ADD_RMS_NORM
from core.common.ops.norm import ADD_RMS_NORM_QUANTIZE as ADD_RMS_NORM_QUANTIZE
from core.common.ops.norm import LAYER_NORM as LAYER_NORM
from core.common.ops.norm import RMS_NORM as RMS_NORM
from core.common.ops.norm import RMS_NORM_QUANTIZE as RMS_NORM_QUANTIZE
from core.common.ops.quantize import QUANTIZE as QUANTIZE
from core.common.ops.quantize import QUANTIZE_ASYMMETRIC as QUANTIZE_ASYMMETRIC
from core.common.ops.quantize import QUANTIZE_FP4 as QUANTIZE_FP4
from core.common.ops.quantize import QUANTIZED_LINEAR as QUANTIZED_LINEAR
from core.common.ops.rotary import QK_NORM_ROTARY as QK_NORM_ROTARY
from core.common.ops.rotary import ROTARY as ROTARY
from core.common.ops.rotary import ROTARY_SINGLE as ROTARY_SINGLE
from core.common.ops.rotary import ROTARY_TABLE as ROTARY_TABLE
from core.common.ops.sampling import ARGMAX as ARGMAX
from core.common.ops.sampling import SAMPLE as SAMPLE

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
