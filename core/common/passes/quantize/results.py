"""Fuse norms and gates with the quantisation of their results: `core::rms_norm_quantize` and its like.

Where others read the value too (a router, a head, a second format of codes) it has to be written anyway; then the op
stays as it is, with a near-miss that names the reader. Layers with the same quantisation of a value count as one
reader, since common subexpressions are already joined.
"""

from __future__ import annotations

from core.common.ops.canonical import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_QUANTIZE,
    GATED_ACTIVATION,
    GATED_ACTIVATION_FUSED,
    GATED_ACTIVATION_QUANTIZE,
    RMS_NORM,
    RMS_NORM_QUANTIZE,
)
from core.common.passes.quantize import examples
from core.common.passes.quantize.chain import Chain, declare_chain

FUSE_RMS_NORM_QUANTIZE = declare_chain(
    "fuse_rms_norm_quantize",
    "Fuse every RMSNorm with the quantisation of its result.",
    Chain(fused={RMS_NORM.name: RMS_NORM_QUANTIZE}),
    examples=examples.norms,
    after=("fuse_gate_up",),
)
FUSE_ADD_RMS_NORM_QUANTIZE = declare_chain(
    "fuse_add_rms_norm_quantize",
    "Fuse every RMSNorm of a sum with the quantisation of its result.",
    Chain(fused={ADD_RMS_NORM.name: ADD_RMS_NORM_QUANTIZE}),
    examples=examples.norms_of_sums,
    after=("fuse_gate_up",),
)
FUSE_GATED_ACTIVATION_QUANTIZE = declare_chain(
    "fuse_gated_activation_quantize",
    "Fuse every gated activation with the quantisation of its result.",
    Chain(
        fused=dict.fromkeys((GATED_ACTIVATION.name, GATED_ACTIVATION_FUSED.name), GATED_ACTIVATION_QUANTIZE),
        renamed={"gate_up": "gate"},
    ),
    examples=examples.gates,
    after=("fuse_gate_up",),
)
