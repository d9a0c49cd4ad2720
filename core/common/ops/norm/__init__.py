"""Norms, with a residual sum before and a quantisation after."""

from __future__ import annotations

from core.common.ops.norm.norms import ADD_RMS_NORM as ADD_RMS_NORM
from core.common.ops.norm.norms import LAYER_NORM as LAYER_NORM
from core.common.ops.norm.norms import RMS_NORM as RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE as ADD_RMS_NORM_QUANTIZE
from core.common.ops.norm.quantized import RMS_NORM_QUANTIZE as RMS_NORM_QUANTIZE
