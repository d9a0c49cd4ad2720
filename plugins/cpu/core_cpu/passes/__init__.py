"""The processor's own passes: rewrites that pay where threads begin and end with each kernel."""

from __future__ import annotations

from core.common.passes import Pass
from core_cpu.passes.shared_codes import JOIN_QUANTIZED_LINEARS

PASSES: tuple[Pass, ...] = (JOIN_QUANTIZED_LINEARS,)
"""All of them, in order of registration."""
