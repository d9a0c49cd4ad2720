"""The passes that every device gets, in the order in which they run unless a declaration says otherwise."""

from __future__ import annotations

import core.common.ops.canonical  # noqa: F401  # uuids of passes reach the registry of ops: it is whole from here on
from core.common.passes.collective.async_tensor_parallel import ASYNC_TENSOR_PARALLEL
from core.common.passes.collective.lift import LIFT_COLLECTIVES
from core.common.passes.collective.norm import FUSE_ALL_REDUCE_NORM
from core.common.passes.collective.sequence_parallel import SEQUENCE_PARALLEL
from core.common.passes.common.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.common.gate_up import FUSE_GATE_UP
from core.common.passes.common.merge_linears import MERGE_LINEARS
from core.common.passes.common.no_ops import REMOVE_NO_OPS
from core.common.passes.common.quantize_scales import SHARE_QUANTIZE_SCALES
from core.common.passes.common.reinplace import FIX_FUNCTIONALIZATION
from core.common.passes.declaration import Pass
from core.common.passes.lift.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.lift.attention import LIFT_ATTENTION
from core.common.passes.lift.attention_cache import FUSE_ATTENTION_CACHE
from core.common.passes.lift.attention_quantize import FUSE_ATTENTION_QUANTIZE
from core.common.passes.lift.gated_activation import LIFT_GATED_ACTIVATION
from core.common.passes.lift.grouped_mlp import LIFT_GROUPED_MLP
from core.common.passes.lift.layer_norm import LIFT_LAYER_NORM
from core.common.passes.lift.linear import FUSE_GATED_LINEAR, LIFT_LINEAR
from core.common.passes.lift.moe_route import LIFT_MOE_ROUTE
from core.common.passes.lift.qk_norm_rotary import FUSE_QK_NORM_ROTARY
from core.common.passes.lift.quantize_results import (
    FUSE_ADD_RMS_NORM_QUANTIZE,
    FUSE_GATED_ACTIVATION_QUANTIZE,
    FUSE_RMS_NORM_QUANTIZE,
)
from core.common.passes.lift.rms_norm import LIFT_RMS_NORM
from core.common.passes.lift.rotary import LIFT_ROTARY
from core.common.passes.lift.rotary_attention import FUSE_ROTARY_ATTENTION
from core.common.passes.lift.rotary_table import LIFT_ROTARY_TABLE

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
    LIFT_GATED_ACTIVATION,
    SHARE_QUANTIZE_SCALES,
    ELIMINATE_COMMON_SUBEXPRESSIONS,
    MERGE_LINEARS,
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
