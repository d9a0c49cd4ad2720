"""Routers and experts, plain and quantised."""

from __future__ import annotations

from core.common.ops.moe.experts import GROUPED_MLP as GROUPED_MLP
from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR as QUANTIZED_GROUPED_LINEAR
from core.common.ops.moe.route import MOE_ROUTE as MOE_ROUTE
