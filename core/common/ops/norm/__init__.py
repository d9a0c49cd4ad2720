"""Norms, with a residual sum before and a quantisation after."""

from core.common.ops.norm.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE

__all__ = ["ADD_RMS_NORM", "ADD_RMS_NORM_QUANTIZE", "LAYER_NORM", "RMS_NORM", "RMS_NORM_QUANTIZE"]
