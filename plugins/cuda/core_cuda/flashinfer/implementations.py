"""FlashInfer's kernels as implementations of canonical ops, behind the plugin's own in preference."""

from __future__ import annotations

from collections.abc import Sequence

from core.common.ops.implementation import OpImplementation, always
from core_cuda.flashinfer import attention, gate, norm, presence, products
from core_cuda.flashinfer.building import BLOCKS, not_ahead
from core_cuda.ops.registration import OP_OF

_KERNELS = {
    "flashinfer_rms_norm": (norm.rms_norm, norm.why_not, norm.timed),
    "flashinfer_gated_activation": (gate.gated_activation_fused, gate.why_not, gate.timed),
    **{f"flashinfer_attention_{b}": (*each, attention.timed(b)) for b, each in attention.ATTENTIONS.items()},
    **{
        f"flashinfer_rotary_attention_{b}": (*each, attention.timed(b))
        for b, each in attention.ROTARY_ATTENTIONS.items()
    },
    "flashinfer_quantized_linear_fast": (products.quantized_linear_fast, products.why_not_fast, always),
    "flashinfer_quantized_linear_blocks": (products.quantized_linear_blocks, products.why_not_blocks, always),
}
"""Kernels by the names that users and reports call them, with condition and what is worth timing."""
_AHEAD = {"flashinfer_quantized_linear_blocks": BLOCKS}
"""Modules that must be built ahead where no other implementation takes such calls: they would run unasked."""
_SLACK = {"flashinfer_quantized_linear_fast": products.FAST_SLACK}


def implementations() -> Sequence[OpImplementation]:
    """Return the implementations, and why none can be used where FlashInfer can't."""
    return tuple(
        OpImplementation(
            op=OP_OF[kernel],
            name=name,
            fn=kernel,
            condition=condition,
            missing=_missing(name),
            timed=worth,
            slack=_SLACK.get(name, 1.0),
        )
        for name, (kernel, condition, worth) in _KERNELS.items()
    )


def _missing(name: str) -> str:
    ahead = not_ahead(_AHEAD[name]) if name in _AHEAD else None
    return presence.why_not() or ahead or ""
