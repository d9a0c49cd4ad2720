"""Linear layers, plain, with a gate, and on quantised weights alone; what low-rank adapters add to them."""

from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.linear.lora import ADD_LORA
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR

__all__ = ["ADD_LORA", "GATED_LINEAR", "LINEAR", "WEIGHT_ONLY_LINEAR"]
