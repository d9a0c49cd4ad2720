"""Fakes of `torch_ipex`, the kernels of intel-extension-for-pytorch 2.8: ops of inference that have none of their own.

Others that lack a fake take packed weights, whose sizes only the library knows, or belong to training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.fakes import FakeOp, ShapeRule, like
from core.common.ops.arguments import Draw
from core.common.ops.declaration import Calls, Sample

_TOKENS, _WIDTH, _HEADS, _HEAD = 7, 64, 4, 32
_EPS = 1e-5


def flash_attention(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Be the rule of `flash_attention`: query (B, H, S, D) gives (B, H, S, D) that lies as (B, S, H, D) does, and the
    logarithms of the softmax's denominators, (B, H, S) fp32 that lie as (B, S, H)."""
    batch, heads, steps, width = query.shape
    out = query.new_empty((batch, steps, heads, width)).transpose(1, 2)
    return out, query.new_empty((batch, steps, heads), dtype=torch.float32).transpose(1, 2)


def _added_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    both = {"input": draw(_TOKENS, _WIDTH), "input1": draw(_TOKENS, _WIDTH)}
    rest = {"weight": draw(_WIDTH), "eps": _EPS}
    return {"sum kept": {**both, **rest, "add_back": True}, "sum dropped": {**both, **rest, "add_back": False}}


def _added_layer_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    both = {"a": draw(_TOKENS, _WIDTH), "b": draw(_TOKENS, _WIDTH), "alpha": 1}
    rest = {"normalized_shape": [_WIDTH], "weight_opt": draw(_WIDTH), "bias_opt": draw(_WIDTH), "eps": _EPS}
    return {"odd rows": {**both, **rest}}


def _batch_norm(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    channels = {name: draw(3).abs() + 0.5 for name in ("weight", "bias", "running_mean", "running_var")}
    return {"odd sides": {"input": draw(2, 3, 5, 5), **channels, "eps": _EPS}}


def _attention(draw: Draw) -> Mapping[str, Mapping[str, Any]]:
    query, key, value = (draw(2, _HEADS, _TOKENS, _HEAD) for _ in range(3))
    rows = draw(2, _TOKENS, 3, _HEADS, _HEAD)
    parts = dict(zip(("query", "key", "value"), (rows[:, :, i].transpose(1, 2) for i in range(3)), strict=True))
    return {
        "each its own": {"query": query, "key": key, "value": value, "is_causal": True},
        "parts of one projection": {**parts, "is_causal": True},
    }


def _samples(device: torch.device, *, calls: Calls) -> Iterator[Sample]:
    for name, kwargs in calls(Draw(torch.bfloat16, device)).items():
        yield Sample(name=name, kwargs=kwargs)


_OPS: Mapping[str, tuple[ShapeRule, Callable[[Draw], Mapping[str, Mapping[str, Any]]], tuple[str, ...]]] = {
    # It writes the sum into its second argument where add_back is set, which its schema does not declare.
    "add_rmsnorm": (like("input"), _added_norm, ("input1",)),
    "add_layernorm": (like("a"), _added_layer_norm, ()),
    "flash_attention": (flash_attention, _attention, ()),
    "frozen_batch_norm": (like("input"), _batch_norm, ()),
}
"""Op -> its rule, calls for comparison, and what it writes."""

TORCH_IPEX = tuple(
    FakeOp(
        op=f"torch_ipex::{name}",
        rule=rule,
        samples=partial(_samples, calls=calls),
        also_writes=writes,
        changes=True,
    )
    for name, (rule, calls, writes) in _OPS.items()
)
