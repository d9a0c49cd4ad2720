"""All canonical ops: importing this module declares the whole vocabulary. A pass across families imports from here."""

from core.common.ops.attention import (
    ATTENTION,
    ATTENTION_QUANTIZE,
    DENSE_ATTENTION,
    ROTARY_ATTENTION,
    ROTARY_ATTENTION_QUANTIZE,
)
from core.common.ops.collective import (
    ALL_GATHER,
    ALL_GATHER_LINEAR,
    ALL_REDUCE,
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4,
    ALL_REDUCE_RMS_NORM,
    LINEAR_REDUCE_SCATTER,
    LOCAL_SHARD,
    REDUCE_SCATTER,
)
from core.common.ops.declaration import CanonicalOp
from core.common.ops.linear import ADD_LORA, GATED_LINEAR, LINEAR, WEIGHT_ONLY_LINEAR
from core.common.ops.mlp import GATED_ACTIVATION, GATED_ACTIVATION_FUSED, GATED_ACTIVATION_QUANTIZE
from core.common.ops.moe import GROUPED_MLP, MOE_ROUTE, QUANTIZED_GROUPED_LINEAR
from core.common.ops.norm import ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE, LAYER_NORM, RMS_NORM, RMS_NORM_QUANTIZE
from core.common.ops.quantize import QUANTIZE, QUANTIZE_ASYMMETRIC, QUANTIZE_FP4, QUANTIZED_LINEAR
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from core.common.ops.rotary import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE, ROTARY_TABLE
from core.common.ops.sampling import ARGMAX, SAMPLE

__all__ = [
    "ADD_LORA",
    "ADD_RMS_NORM",
    "ADD_RMS_NORM_QUANTIZE",
    "ALL_GATHER",
    "ALL_GATHER_LINEAR",
    "ALL_REDUCE",
    "ALL_REDUCE_ADD_RMS_NORM",
    "ALL_REDUCE_ADD_RMS_NORM_QUANTIZE",
    "ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4",
    "ALL_REDUCE_RMS_NORM",
    "ARGMAX",
    "ATTENTION",
    "ATTENTION_QUANTIZE",
    "CAUSAL_CONV1D_UPDATE",
    "DENSE_ATTENTION",
    "GATED_ACTIVATION",
    "GATED_ACTIVATION_FUSED",
    "GATED_ACTIVATION_QUANTIZE",
    "GATED_DELTA_RULE",
    "GATED_LINEAR",
    "GROUPED_MLP",
    "LAYER_NORM",
    "LINEAR",
    "LINEAR_REDUCE_SCATTER",
    "LOCAL_SHARD",
    "MOE_ROUTE",
    "OPS",
    "QK_NORM_ROTARY",
    "QUANTIZE",
    "QUANTIZED_GROUPED_LINEAR",
    "QUANTIZED_LINEAR",
    "QUANTIZE_ASYMMETRIC",
    "QUANTIZE_FP4",
    "REDUCE_SCATTER",
    "RMS_NORM",
    "RMS_NORM_QUANTIZE",
    "ROTARY",
    "ROTARY_ATTENTION",
    "ROTARY_ATTENTION_QUANTIZE",
    "ROTARY_SINGLE",
    "ROTARY_TABLE",
    "SAMPLE",
    "SELECTIVE_STATE_UPDATE",
    "WEIGHT_ONLY_LINEAR",
]

OPS = tuple(value for value in vars().values() if isinstance(value, CanonicalOp))
"""Every op of the vocabulary: those imported above."""
