"""Linear layers, plain, with a gate, and on quantised weights alone."""

from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR

__all__ = ["GATED_LINEAR", "LINEAR", "WEIGHT_ONLY_LINEAR"]
