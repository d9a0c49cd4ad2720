"""Linear layers, plain, with a gate, and on quantised weights alone."""

from __future__ import annotations

from core.common.ops.linear.gated import GATED_LINEAR as GATED_LINEAR
from core.common.ops.linear.gated import LINEAR as LINEAR
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR as WEIGHT_ONLY_LINEAR
