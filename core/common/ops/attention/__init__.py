"""Attention over a paged cache and over dense keys and values."""

from __future__ import annotations

from core.common.ops.attention.dense import DENSE_ATTENTION as DENSE_ATTENTION
from core.common.ops.attention.paged import ATTENTION as ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE as ATTENTION_QUANTIZE
from core.common.ops.attention.quantized import GRANULARITIES as GRANULARITIES
from core.common.ops.attention.quantized import ROTARY_ATTENTION_QUANTIZE as ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION as ROTARY_ATTENTION
