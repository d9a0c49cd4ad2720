"""Rotary position embeddings and their tables."""

from __future__ import annotations

from core.common.ops.rotary.rotation import QK_NORM_ROTARY as QK_NORM_ROTARY
from core.common.ops.rotary.rotation import ROTARY as ROTARY
from core.common.ops.rotary.rotation import ROTARY_SINGLE as ROTARY_SINGLE
from core.common.ops.rotary.table import ROTARY_TABLE as ROTARY_TABLE
