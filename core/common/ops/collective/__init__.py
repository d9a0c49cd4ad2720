"""Collectives, and collectives with norms and products around them."""

from core.common.ops.collective.collectives import ALL_GATHER, ALL_REDUCE, LOCAL_SHARD, REDUCE_SCATTER, group_size
from core.common.ops.collective.linear import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from core.common.ops.collective.norm import (
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4,
    ALL_REDUCE_RMS_NORM,
)

__all__ = [
    "ALL_GATHER",
    "ALL_GATHER_LINEAR",
    "ALL_REDUCE",
    "ALL_REDUCE_ADD_RMS_NORM",
    "ALL_REDUCE_ADD_RMS_NORM_QUANTIZE",
    "ALL_REDUCE_ADD_RMS_NORM_QUANTIZE_FP4",
    "ALL_REDUCE_RMS_NORM",
    "LINEAR_REDUCE_SCATTER",
    "LOCAL_SHARD",
    "REDUCE_SCATTER",
    "group_size",
]
