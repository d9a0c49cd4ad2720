"""Quantisation to codes with scales, and back."""

from __future__ import annotations

from core.common.ops.quantize.asymmetric import QUANTIZE_ASYMMETRIC as QUANTIZE_ASYMMETRIC
from core.common.ops.quantize.fp4 import QUANTIZE_FP4 as QUANTIZE_FP4
from core.common.ops.quantize.symmetric import QUANTIZE as QUANTIZE
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR as QUANTIZED_LINEAR
