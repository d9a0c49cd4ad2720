"""Quantisation to codes with scales, and back."""

from core.common.ops.quantize.asymmetric import QUANTIZE_ASYMMETRIC
from core.common.ops.quantize.fp4 import QUANTIZE_FP4
from core.common.ops.quantize.symmetric import QUANTIZE, QUANTIZED_LINEAR

__all__ = ["QUANTIZE", "QUANTIZED_LINEAR", "QUANTIZE_ASYMMETRIC", "QUANTIZE_FP4"]
