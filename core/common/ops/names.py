"""The names of the canonical ops: what a command line is checked by, before torch is imported."""

from __future__ import annotations

import difflib

from core.errors import UsageError

OP_NAMES = (
    *("core::add_lora", "core::add_rms_norm", "core::add_rms_norm_quantize", "core::all_gather"),
    *("core::all_gather_linear", "core::all_reduce", "core::all_reduce_add_rms_norm"),
    *("core::all_reduce_add_rms_norm_quantize", "core::all_reduce_add_rms_norm_quantize_fp4"),
    *("core::all_reduce_rms_norm", "core::argmax", "core::attention", "core::attention_quantize"),
    *("core::causal_conv1d_update", "core::dense_attention", "core::gated_activation"),
    *("core::gated_activation_fused", "core::gated_activation_quantize", "core::gated_delta_rule"),
    *("core::gated_linear", "core::grouped_mlp", "core::layer_norm", "core::linear"),
    *("core::linear_reduce_scatter", "core::local_shard", "core::moe_route", "core::qk_norm_rotary"),
    *("core::quantize", "core::quantize_asymmetric", "core::quantize_fp4"),
    *("core::quantized_grouped_linear", "core::quantized_linear", "core::reduce_scatter", "core::rms_norm"),
    *("core::rms_norm_quantize", "core::rotary", "core::rotary_attention"),
    *("core::rotary_attention_quantize", "core::rotary_single", "core::rotary_table", "core::sample"),
    *("core::selective_state_update", "core::weight_only_linear"),
)
"""The qualified names of `core.common.ops.canonical.OPS`, in the order of the alphabet."""


def check_op(asked: str, name: str) -> None:
    """Raise `UsageError` for a name that no canonical op has.

    asked: what the error says was asked for.
    """
    if name not in OP_NAMES:
        close = difflib.get_close_matches(name, OP_NAMES, 1, cutoff=0.7)
        raise UsageError(
            asked,
            found=f"there is no canonical op {name!r}",
            remedy=f"did you mean {close[0]!r}?" if close else f"name one of: {', '.join(OP_NAMES)}",
        )
