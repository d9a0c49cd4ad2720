"""The plugin's passes, in the order in which they run unless a declaration says otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

import torch

from core.common.passes import Pass
from core_npu.passes.cleanup.copies import ERASE_COPIES
from core_npu.passes.cleanup.multiply_add import FUSE_MULTIPLY_ADD
from core_npu.passes.cleanup.scales import FOLD_DOUBLE_RECIPROCAL
from core_npu.passes.linear.all_reduce import FUSE_LINEAR_ALL_REDUCE
from core_npu.passes.linear.transpose_matmul import FUSE_TRANSPOSE_BATCHMATMUL
from core_npu.passes.mlp.swiglu_quantize import FUSE_SWIGLU_DYNAMIC_QUANT
from core_npu.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core_npu.passes.norm.cast import FUSE_ADD_RMS_NORM_CAST
from core_npu.passes.norm.dynamic_quantize import FUSE_ADD_RMS_NORM_DYNAMIC_QUANT
from core_npu.passes.norm.quantize import FUSE_ADD_RMS_NORM_QUANT, FUSE_RMS_NORM_QUANT
from core_npu.passes.references import register_references
from core_npu.passes.rotary.qk_norm import LIFT_QK_NORM_ROTARY
from core_npu.passes.rotary.qkv_cache import FUSE_QKV_RMS_NORM_ROPE_CACHE

__all__ = ["NEEDED", "PASSES", "available"]

log = logging.getLogger("core.npu")

PASSES: tuple[Pass, ...] = (
    ERASE_COPIES,
    FOLD_DOUBLE_RECIPROCAL,
    FUSE_QKV_RMS_NORM_ROPE_CACHE,
    LIFT_QK_NORM_ROTARY,
    FUSE_ADD_RMS_NORM,
    FUSE_ADD_RMS_NORM_QUANT,
    FUSE_ADD_RMS_NORM_DYNAMIC_QUANT,
    FUSE_ADD_RMS_NORM_CAST,
    FUSE_RMS_NORM_QUANT,
    FUSE_SWIGLU_DYNAMIC_QUANT,
    FUSE_MULTIPLY_ADD,
    FUSE_TRANSPOSE_BATCHMATMUL,
    FUSE_LINEAR_ALL_REDUCE,
)
NEEDED: Mapping[str, str] = MappingProxyType(
    {
        FUSE_QKV_RMS_NORM_ROPE_CACHE.name: "npu_qkv_rms_norm_rope_cache",
        FUSE_ADD_RMS_NORM.name: "npu_add_rms_norm",
        FUSE_ADD_RMS_NORM_QUANT.name: "npu_add_rms_norm_quant",
        FUSE_ADD_RMS_NORM_DYNAMIC_QUANT.name: "npu_add_rms_norm_dynamic_quant",
        FUSE_ADD_RMS_NORM_CAST.name: "npu_add_rms_norm_cast",
        FUSE_RMS_NORM_QUANT.name: "npu_rms_norm_quant",
        FUSE_SWIGLU_DYNAMIC_QUANT.name: "npu_dequant_swiglu_quant",
        FUSE_TRANSPOSE_BATCHMATMUL.name: "npu_transpose_batchmatmul",
        FUSE_LINEAR_ALL_REDUCE.name: "npu_mm_all_reduce_base",
    }
)
"""The op of torch_npu that each pass makes; one that is not listed makes none."""


def available() -> tuple[Pass, ...]:
    """Return the passes whose ops the loaded torch_npu has; the others are named in the log.

    Gives these ops their references on the host, by which verification judges what the passes do.
    """
    register_references()
    missing = {name: made for name, made in NEEDED.items() if not hasattr(torch.ops.npu, made)}
    for name, made in missing.items():
        log.warning("pass %s is left out: the loaded torch_npu has no op %s", name, made)
    return tuple(declared for declared in PASSES if declared.name not in missing)
