"""Passes that need no canonical op: they take away what computes nothing, and join what is computed twice.

No-ops go before the lifts, which then meet fewer spellings. The others come after them: the lifts read a model as it
was written, where each layer has its own tables and each projection its own result.
"""

from __future__ import annotations

LIFTS = (
    *("lift_rms_norm", "fuse_add_rms_norm", "lift_layer_norm", "lift_gated_activation", "lift_rotary"),
    *("fuse_qk_norm_rotary", "lift_attention", "fuse_attention_cache", "lift_moe_route", "lift_grouped_mlp"),
)
"""Names of the passes that recognise what a model computes; one that is absent means nothing."""
