"""All canonical ops: importing this module declares the whole vocabulary."""

from __future__ import annotations

from core.common.ops.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.attention import ATTENTION
from core.common.ops.collective import ALL_REDUCE
from core.common.ops.declaration import CanonicalOp
from core.common.ops.dense_attention import DENSE_ATTENTION
from core.common.ops.linear import GATED_LINEAR, LINEAR
from core.common.ops.moe import GROUPED_MLP, MOE_ROUTE
from core.common.ops.normalization import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.quantization import QUANTIZE, QUANTIZED_LINEAR
from core.common.ops.rotary import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE
from core.common.ops.rotary_attention import ROTARY_ATTENTION
from core.common.ops.rotary_table import ROTARY_TABLE
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
    SAMPLE,
    ARGMAX,
    ALL_REDUCE,
)
