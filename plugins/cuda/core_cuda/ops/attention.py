"""Attention, plain and behind a rotation: one kernel where sequences bring few new tokens, one for prompts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.common.ops.attention import ATTENTION
from core.common.ops.implementation import OpCall
from core.common.ops.rotary_attention import ROTARY_ATTENTION
from core_cuda.ops import attention_rotation, decode_attention, prefill_attention
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rotary import rotate

__all__ = ["attention", "attention_condition", "rotary_attention", "rotary_attention_condition"]

_TURNED_APART = 1
"""Tokens up to which decode turns query and key by a kernel of its own. Each program that shares a sequence turns its
queries again, and with one sequence that is what all wait for: on an H200 two kernels take 2.2 and 2.8 us less in a
layer of 1 and 8 billion parameters, at 8 sequences 1.8 and 5.3 us more."""
_ATTENTION = (
    *("key_cache", "value_cache", "block_table", "slot_mapping", "seq_lens", "query_starts"),
    *("scale", "window", "softcap", "sinks", "max_query_len"),
)


def attention_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::attention`, or None."""
    if _is_decode(**call.args):
        return decode_attention.refuses(call)
    return prefill_attention.refuses(call)


@kernel_of(ATTENTION)
def attention(*operands: Tensor, **options: Any) -> Tensor:
    """Do what `core::attention` does, for calls that `attention_condition` lets pass; returns (T, H, V), contiguous."""
    args = dict(ATTENTION.bind(operands, options).args)
    del args["mask"]
    if _is_decode(**args):
        del args["causal"]
        return decode_attention.decode(**args)
    del args["max_query_len"]
    return prefill_attention.prefill(**args)


def rotary_attention_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::rotary_attention`, or None."""
    if _is_decode(**call.args):
        return decode_attention.refuses(call) or attention_rotation.refuses(call)
    return prefill_attention.refuses_rotary(call)


@kernel_of(ROTARY_ATTENTION)
def rotary_attention(*operands: Tensor, **options: Any) -> Tensor:
    """Do what `core::rotary_attention` does, for calls that `rotary_attention_condition` lets pass."""
    args = dict(ROTARY_ATTENTION.bind(operands, options).args)
    if _is_decode(**args):
        if args["query"].shape[0] <= _TURNED_APART:
            return _turned_apart(**args)
        turning = attention_rotation.take_turning(args)
        return decode_attention.decode(**args, turning=turning)
    del args["max_query_len"]
    return prefill_attention.prefill_rotary_attention(**args)


def _turned_apart(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    attention = {name: options.pop(name) for name in _ATTENTION}
    query, key = rotate(query, key, cos, sin, **options)
    return decode_attention.decode(query, key, value, **attention)


def _is_decode(*, query: Tensor, key: Tensor, max_query_len: int, causal: bool = True, **_: Any) -> bool:
    return causal and decode_attention.serves(query.shape[1], key.shape[1], max_query_len)
