"""Transformers' own gated delta rule, called as the installed version's layers call it."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

_STEP: Any = unwrap(torch_recurrent_gated_delta_rule)
REPEATS_HEADS = "repeat_interleave" in _STEP.__code__.co_names
"""Whether it repeats the heads of queries and keys itself; before transformers 5.23 the layer does, before the call."""


def own_delta_rule(*, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """Return results [B, T, heads, values] and the new state. query, key: [B, T, heads / group, keys]."""
    group = value.shape[2] // key.shape[2]
    if group > 1 and not REPEATS_HEADS:
        query, key = query.repeat_interleave(group, dim=2), key.repeat_interleave(group, dim=2)
    out, new = _STEP(query, key, value, **rest)
    return out, new
