"""The names of the passes that recognise what a model computes; who builds on what they make is ordered after them."""

from __future__ import annotations

LIFTS = (
    *("lift_rms_norm", "fuse_add_rms_norm", "lift_layer_norm", "lift_gated_activation", "lift_rotary"),
    *("fuse_qk_norm_rotary", "lift_attention", "fuse_attention_cache", "lift_moe_route", "lift_grouped_mlp"),
)
"""For `Pass.after`; one that is absent means nothing."""
