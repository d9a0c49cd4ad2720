"""Attention, plain and behind a rotation: one kernel where sequences bring few new tokens, one for prompts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.common.ops.attention import ATTENTION
from core.common.ops.implementation import OpCall
from core.common.ops.rotary_attention import ROTARY_ATTENTION
from core_cuda.ops import attention_rotation, decode_attention, prefill_attention
from core_cuda.ops.registration import kernel_of

__all__ = ["attention", "attention_condition", "rotary_attention", "rotary_attention_condition"]


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
        turning = attention_rotation.take_turning(args)
        return decode_attention.decode(**args, turning=turning)
    del args["max_query_len"]
    return prefill_attention.prefill_rotary_attention(**args)


def _is_decode(*, query: Tensor, key: Tensor, max_query_len: int, causal: bool = True, **_: Any) -> bool:
    return causal and decode_attention.serves(query.shape[1], key.shape[1], max_query_len)
