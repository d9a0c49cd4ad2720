"""Gated activations, with a quantisation after."""

from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE

__all__ = ["GATED_ACTIVATION", "GATED_ACTIVATION_FUSED", "GATED_ACTIVATION_QUANTIZE"]
