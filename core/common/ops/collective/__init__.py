"""Collectives, and collectives with norms and products around them."""

from __future__ import annotations

from core.common.ops.collective.collectives import ALL_GATHER as ALL_GATHER
from core.common.ops.collective.collectives import ALL_REDUCE as ALL_REDUCE
from core.common.ops.collective.collectives import LOCAL_SHARD as LOCAL_SHARD
from core.common.ops.collective.collectives import REDUCE_SCATTER as REDUCE_SCATTER
from core.common.ops.collective.collectives import group_size as group_size
from core.common.ops.collective.linear import ALL_GATHER_LINEAR as ALL_GATHER_LINEAR
from core.common.ops.collective.linear import LINEAR_REDUCE_SCATTER as LINEAR_REDUCE_SCATTER
from core.common.ops.collective.norm import ALL_REDUCE_ADD_RMS_NORM as ALL_REDUCE_ADD_RMS_NORM
from core.common.ops.collective.norm import ALL_REDUCE_ADD_RMS_NORM_QUANTIZE as ALL_REDUCE_ADD_RMS_NORM_QUANTIZE
from core.common.ops.collective.norm import ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4 as ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4
from core.common.ops.collective.norm import ALL_REDUCE_RMS_NORM as ALL_REDUCE_RMS_NORM
