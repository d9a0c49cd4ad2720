"""Mistakes planted on purpose into the passes of this tree: they test and demonstrate `verify` and `core bisect`.

A planted pass runs the real one and then makes a single site of it wrong, the middle one where there are several: the
tools have to name the pass and that site. Such mistakes were made in real rewrites, or nearly.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence

import torch

from core.common.passes.declaration import Pass
from core.common.passes.standard import COMMON_PASSES
from core.errors import UsageError
from core.verify.mistakes import (
    NO_CHANGE,
    OTHER_KIND,
    Edit,
    Mistake,
    alike_but_literals,
    argument,
    dropped,
    first_operand_for_sum,
    lost_write,
    negated,
    other_rows,
    other_style,
    swapped,
    swapped_slices,
    times,
    tiny_addend,
    with_mistake,
    write_before_read,
    write_into_copy,
    zero,
)

__all__ = ["MISTAKES", "NO_CHANGE", "Edit", "Mistake", "argument", "mistakes", "planted", "swapped", "with_mistake"]


def _mistake(name: str, of: str, what: str, make: Edit, *, any_node: bool = False) -> Mistake:
    return Mistake(name=name, of=of, what=what, make=make, any_node=any_node)


_NARROW = torch.bfloat16

MISTAKES: tuple[Mistake, ...] = (
    _mistake("norm-eps", "lift_rms_norm", "eps ten times too large", argument("rms_norm", "eps", times(10))),
    _mistake("norm-offset", "lift_rms_norm", "`1 + weight` read as `weight`", argument("rms_norm", "offset", zero)),
    _mistake("norm-weight", "lift_rms_norm", "the weight is left out", argument("rms_norm", "weight", dropped)),
    _mistake(
        "norm-precision",
        "lift_rms_norm",
        "statistics in bfloat16",
        argument("rms_norm", "compute_dtype", lambda value: _NARROW),
    ),
    _mistake(
        "add-norm-eps", "fuse_add_rms_norm", "eps ten times too large", argument("add_rms_norm", "eps", times(10))
    ),
    _mistake(
        "add-norm-residual", "fuse_add_rms_norm", "the sum handed on is only its first operand", first_operand_for_sum
    ),
    _mistake(
        "gate-kind",
        "lift_gated_activation",
        "another activation, such as the tanh form of GELU for the exact one",
        argument("gated_activation|gated_activation_fused", "kind", lambda kind: OTHER_KIND.get(kind, NO_CHANGE)),
    ),
    _mistake("gate-swapped", "lift_gated_activation", "gate and up swapped", swapped("gated_activation", "gate", "up")),
    _mistake(
        "gate-half",
        "lift_gated_activation",
        "the wrong half is the gate",
        argument("gated_activation_fused", "gate_first", operator.not_),
    ),
    _mistake("rotary-swapped", "lift_rotary", "cos and sin swapped", swapped("rotary|rotary_single", "cos", "sin")),
    _mistake("rotary-sign", "lift_rotary", "the sign of sin", argument("rotary|rotary_single", "sin", negated)),
    _mistake(
        "rotary-style",
        "lift_rotary",
        "pairs of neighbours for pairs of halves",
        argument("rotary|rotary_single", "style", other_style),
    ),
    _mistake(
        "qk-norm-eps", "fuse_qk_norm_rotary", "eps ten times too large", argument("qk_norm_rotary", "eps", times(10))
    ),
    _mistake(
        "qk-norm-weights",
        "fuse_qk_norm_rotary",
        "the weights of query and key swapped",
        swapped("qk_norm_rotary", "query_weight", "key_weight"),
    ),
    _mistake("layer-norm-eps", "lift_layer_norm", "eps ten times too large", argument("layer_norm", "eps", times(10))),
    _mistake("layer-norm-bias", "lift_layer_norm", "the bias is left out", argument("layer_norm", "bias", dropped)),
    _mistake(
        "attention-scale",
        "lift_attention",
        "the scale squared",
        argument("dense_attention", "scale", lambda s: s * s),
    ),
    _mistake(
        "attention-mask",
        "lift_attention",
        "the mask is left out",
        argument("dense_attention", "mask", dropped),
    ),
    _mistake(
        "attention-causal",
        "lift_attention",
        "causal where the mask says all, or the reverse",
        argument("dense_attention", "causal", operator.not_),
    ),
    _mistake("cache-write", "fuse_attention_cache", "keys and values written into a copy of the cache", lost_write),
    _mistake(
        "cache-swapped",
        "fuse_attention_cache",
        "keys written where values belong, and the reverse",
        swapped("dense_attention", "key_cache", "value_cache"),
    ),
    _mistake(
        "route-weights",
        "lift_moe_route",
        "weights renormalised where they are not, or the reverse",
        argument("moe_route", "renormalize", operator.not_),
    ),
    _mistake("route-scale", "lift_moe_route", "weights ten times too large", argument("moe_route", "scale", times(10))),
    _mistake(
        "experts-kind",
        "lift_grouped_mlp",
        "another activation",
        argument("grouped_mlp", "kind", lambda kind: OTHER_KIND.get(kind, NO_CHANGE)),
    ),
    _mistake("convolution-state", "lift_causal_conv1d", "the state is not kept", lost_write),
    _mistake(
        "convolution-slots",
        "lift_causal_conv1d",
        "each row reads the state of another",
        argument("causal_conv1d_update", "slots", other_rows),
    ),
    _mistake(
        "convolution-activation",
        "lift_causal_conv1d",
        "SiLU left out, or added",
        argument("causal_conv1d_update", "silu", operator.not_),
    ),
    _mistake("delta-state", "lift_gated_delta_rule", "the state is not kept", lost_write),
    _mistake(
        "delta-slots",
        "lift_gated_delta_rule",
        "each row keeps its state where another's belongs",
        argument("gated_delta_rule", "kept", other_rows),
    ),
    _mistake(
        "delta-norm",
        "lift_gated_delta_rule",
        "query and key are not normed",
        argument("gated_delta_rule", "norm_eps", zero),
    ),
    _mistake("space-state", "lift_selective_state_update", "the state is not kept", lost_write),
    _mistake(
        "space-slots",
        "lift_selective_state_update",
        "each row reads the state of another",
        argument("selective_state_update", "slots", other_rows),
    ),
    _mistake(
        "space-step",
        "lift_selective_state_update",
        "the step taken without its softplus",
        argument("selective_state_update", "dt_softplus", operator.not_),
    ),
    _mistake("merged-slices", "merge_linears", "two results of a merged linear swapped", swapped_slices),
    _mistake("lora-slices", "merge_lora", "what adapters add to two layers swapped", swapped_slices),
    _mistake(
        "lora-slots",
        "merge_lora",
        "each row has the adapter of another",
        argument("add_lora", "slots", other_rows),
    ),
    _mistake(
        "gate-up-half",
        "fuse_gate_up",
        "the wrong half is the gate",
        argument("gated_activation_fused", "gate_first", operator.not_),
    ),
    _mistake(
        "rotary-attention-tables",
        "fuse_rotary_attention",
        "cos and sin swapped",
        swapped("rotary_attention", "cos", "sin"),
    ),
    _mistake(
        "rotary-attention-weights",
        "fuse_rotary_attention",
        "the weights of query and key swapped",
        swapped("rotary_attention", "query_weight", "key_weight"),
    ),
    _mistake(
        "rotary-table-layout",
        "lift_rotary_table",
        "angles of neighbours for angles of halves",
        argument("rotary_table", "layout", other_style),
    ),
    _mistake("linear-bias", "lift_linear", "the bias is left out", argument("linear", "bias", dropped)),
    _mistake(
        "gated-linear-half",
        "fuse_gated_linear",
        "the wrong half is the gate",
        argument("gated_linear", "gate_first", operator.not_),
    ),
    _mistake(
        "norm-codes-eps",
        "fuse_rms_norm_quantize",
        "eps ten times too large",
        argument("rms_norm_quantize", "eps", times(10)),
    ),
    _mistake(
        "add-norm-codes-sum",
        "fuse_add_rms_norm_quantize",
        "the sum handed on is only its first operand",
        first_operand_for_sum,
    ),
    _mistake(
        "gate-codes-kind",
        "fuse_gated_activation_quantize",
        "another activation",
        argument("gated_activation_quantize", "kind", lambda kind: OTHER_KIND.get(kind, NO_CHANGE)),
    ),
    _mistake(
        "attention-codes-scale",
        "fuse_attention_quantize",
        "scores a quarter larger",
        argument("attention_quantize|rotary_attention_quantize", "scale", times(1.25)),
    ),
    _mistake(
        "shared-scale",
        "share_quantize_scales",
        "a static scale taken for one that is made of the values",
        argument("quantize", "scale", dropped),
        any_node=True,
    ),
    _mistake(
        "in-place-copy",
        "fix_functionalization",
        "an update in place of a copy of what it updates",
        write_into_copy,
        any_node=True,
    ),
    _mistake("no-op-eps", "remove_no_ops", "`x + eps` taken for x", tiny_addend, any_node=True),
    _mistake(
        "cse-write",
        "eliminate_common_subexpressions",
        "a value from after a write taken for the one before it",
        write_before_read,
        any_node=True,
    ),
    _mistake(
        "cse-slices",
        "eliminate_common_subexpressions",
        "two slices of one tensor taken for equal",
        alike_but_literals,
        any_node=True,
    ),
)
"""All planted mistakes; tests/verify/test_planted.py requires at least one for each pass of this tree."""


def mistakes() -> tuple[Mistake, ...]:
    """Return the mistakes of passes that this tree has."""
    names = {declared.name for declared in COMMON_PASSES}
    return tuple(mistake for mistake in MISTAKES if mistake.of in names)


def planted(name: str, passes: Sequence[Pass] = COMMON_PASSES) -> Pass:
    """Return the pass with the mistake of that name in it; raise `UsageError` listing all of them for other names."""
    known = {mistake.name: mistake for mistake in mistakes()}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        raise UsageError(
            f"planting {name!r}",
            found=f"the mistakes are: {', '.join(known)}",
            remedy=f"did you mean {close[0]!r}?"
            if close
            else "name one of these, or a pass of yours as module:attribute",
        )
    mistake = known[name]
    return with_mistake(next(declared for declared in passes if declared.name == mistake.of), mistake)
