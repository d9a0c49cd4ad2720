"""Rotary position embeddings and their tables."""

from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE
from core.common.ops.rotary.table import ROTARY_TABLE

__all__ = ["QK_NORM_ROTARY", "ROTARY", "ROTARY_SINGLE", "ROTARY_TABLE"]
