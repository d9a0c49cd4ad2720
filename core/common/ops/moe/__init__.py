"""Routers and experts, plain and quantised."""

from core.common.ops.moe.experts import GROUPED_MLP
from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR
from core.common.ops.moe.route import MOE_ROUTE

__all__ = ["GROUPED_MLP", "MOE_ROUTE", "QUANTIZED_GROUPED_LINEAR"]
