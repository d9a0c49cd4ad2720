"""The passes that every device gets, in the order in which they run unless a declaration says otherwise."""

from __future__ import annotations

import core.common.ops.canonical  # noqa: F401  # declares all ops, on which uuids depend
from core.common.passes.attention.cache import FUSE_ATTENTION_CACHE
from core.common.passes.attention.lift import LIFT_ATTENTION
from core.common.passes.attention.quantize import FUSE_ATTENTION_QUANTIZE
from core.common.passes.cleanup.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.common.passes.collective.async_tensor_parallel import ASYNC_TENSOR_PARALLEL
from core.common.passes.collective.lift import LIFT_COLLECTIVES
from core.common.passes.collective.norm import FUSE_ALL_REDUCE_NORM
from core.common.passes.collective.sequence_parallel import SEQUENCE_PARALLEL
from core.common.passes.declaration import Pass
from core.common.passes.functional.reinplace import FIX_FUNCTIONALIZATION
from core.common.passes.linear.lift import FUSE_GATED_LINEAR, LIFT_LINEAR
from core.common.passes.linear.merge import MERGE_LINEARS
from core.common.passes.linear.merge_lora import MERGE_LORA
from core.common.passes.mlp.gate_up import FUSE_GATE_UP
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.common.passes.moe.grouped_mlp import LIFT_GROUPED_MLP
from core.common.passes.moe.route import LIFT_MOE_ROUTE
from core.common.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.norm.layer_norm import LIFT_LAYER_NORM
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.quantize.results import (
    FUSE_ADD_RMS_NORM_QUANTIZE,
    FUSE_GATED_ACTIVATION_QUANTIZE,
    FUSE_RMS_NORM_QUANTIZE,
)
from core.common.passes.quantize.scales import SHARE_QUANTIZE_SCALES
from core.common.passes.recurrent.convolution import LIFT_CAUSAL_CONV1D
from core.common.passes.recurrent.delta_rule import LIFT_GATED_DELTA_RULE
from core.common.passes.recurrent.state_space import LIFT_SELECTIVE_STATE_UPDATE
from core.common.passes.rotary.attention import FUSE_ROTARY_ATTENTION
from core.common.passes.rotary.lift import LIFT_ROTARY
from core.common.passes.rotary.qk_norm import FUSE_QK_NORM_ROTARY
from core.common.passes.rotary.table import LIFT_ROTARY_TABLE

COMMON_PASSES: tuple[Pass, ...] = (
    REMOVE_NO_OPS,
    LIFT_RMS_NORM,
    LIFT_LAYER_NORM,
    LIFT_ROTARY,
    FUSE_QK_NORM_ROTARY,
    FUSE_ADD_RMS_NORM,
    LIFT_ATTENTION,
    FUSE_ATTENTION_CACHE,
    LIFT_MOE_ROUTE,
    LIFT_GROUPED_MLP,
    LIFT_CAUSAL_CONV1D,
    LIFT_GATED_DELTA_RULE,
    LIFT_SELECTIVE_STATE_UPDATE,
    LIFT_GATED_ACTIVATION,
    SHARE_QUANTIZE_SCALES,
    ELIMINATE_COMMON_SUBEXPRESSIONS,
    MERGE_LINEARS,
    MERGE_LORA,
    FUSE_GATE_UP,
    FUSE_RMS_NORM_QUANTIZE,
    FUSE_ADD_RMS_NORM_QUANTIZE,
    FUSE_GATED_ACTIVATION_QUANTIZE,
    FUSE_ROTARY_ATTENTION,
    FUSE_ATTENTION_QUANTIZE,
    LIFT_ROTARY_TABLE,
    LIFT_LINEAR,
    FUSE_GATED_LINEAR,
    LIFT_COLLECTIVES,
    SEQUENCE_PARALLEL,
    FUSE_ALL_REDUCE_NORM,
    ASYNC_TENSOR_PARALLEL,
    FIX_FUNCTIONALIZATION,
)
