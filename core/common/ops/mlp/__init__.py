"""Gated activations, with a quantisation after."""

from __future__ import annotations

from core.common.ops.mlp.activation import GATED_ACTIVATION as GATED_ACTIVATION
from core.common.ops.mlp.activation import GATED_ACTIVATION_FUSED as GATED_ACTIVATION_FUSED
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE as GATED_ACTIVATION_QUANTIZE
