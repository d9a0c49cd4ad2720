"""Attention over a paged cache and over dense keys and values."""

from core.common.ops.attention.dense import DENSE_ATTENTION
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, GRANULARITIES, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION

__all__ = [
    "ATTENTION",
    "ATTENTION_QUANTIZE",
    "DENSE_ATTENTION",
    "GRANULARITIES",
    "ROTARY_ATTENTION",
    "ROTARY_ATTENTION_QUANTIZE",
]
