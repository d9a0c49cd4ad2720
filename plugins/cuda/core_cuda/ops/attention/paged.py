"""Attention, plain and behind a rotation: one kernel where sequences bring few new tokens, one for prompts.

Each may quantise its result by one given scale. A scale computed from the result would need all heads of a token, but a
program has only one key/value head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.quantized import ATTENTION_QUANTIZE, ROTARY_ATTENTION_QUANTIZE
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.implementation import Condition, OpCall
from core_cuda.ops.attention import decode as decode_attention
from core_cuda.ops.attention import prefill as prefill_attention
from core_cuda.ops.attention import rotation as attention_rotation
from core_cuda.ops.attention.decode import Coding
from core_cuda.ops.conditions import code_dtype
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rotary.rotation import rotate

_TURNED_APART = 1
"""Tokens up to which decode rotates query and key in a separate kernel. Each program that shares a sequence turns its
queries again, and with one sequence that is what all wait for: on an H200 two kernels take 2.2 and 2.8 us less in a
layer of 1 and 8 billion parameters, at 8 sequences 1.8 and 5.3 us more."""
_ATTENTION = (
    *("key_cache", "value_cache", "block_table", "slot_mapping", "seq_lens", "query_starts"),
    *("scale", "window", "chunked", "softcap", "sinks", "max_query_len", "k_scale", "v_scale", "coding"),
)


def attention_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::attention`, or None."""
    if _is_decode(**call.args):
        return decode_attention.why_not(call)
    return prefill_attention.why_not(call)


def _attend(**args: Any) -> Tensor:
    """Do what `core::attention` does, for calls that `attention_condition` lets pass; returns (T, H, V), contiguous."""
    del args["mask"]
    if _is_decode(**args):
        del args["causal"]
        return decode_attention.decode(**args)
    del args["max_query_len"]
    return prefill_attention.prefill(**args)


def rotary_attention_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of `core::rotary_attention`, or None."""
    if _is_decode(**call.args):
        return decode_attention.why_not(call) or attention_rotation.why_not(call)
    return prefill_attention.why_not_rotary(call)


def _turn_and_attend(**args: Any) -> Tensor:
    """Do what `core::rotary_attention` does, for calls that `rotary_attention_condition` lets pass."""
    if _is_decode(**args):
        if args["query"].shape[0] <= _TURNED_APART:
            return _turned_apart(**args)
        turning = attention_rotation.take_turning(args)
        return decode_attention.decode(**args, turning=turning)
    del args["max_query_len"]
    return prefill_attention.prefill_rotary_attention(**args)


def _turned_apart(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    attention = {name: options.pop(name) for name in _ATTENTION if name in options}
    query, key = rotate(query, key, cos, sin, **options)
    return decode_attention.decode(query, key, value, **attention)


def quantize_condition(condition: Condition) -> Condition:
    """Return the condition of an attention that ends in codes; condition: of the attention."""

    def refusal(call: OpCall) -> str | None:
        scale = call.args["out_scale"]
        if call.args["granularity"] != "tensor" or scale is None:
            return "its scale is made of all heads, and a program of the kernel has one key/value head"
        if scale.dtype != torch.float32:
            return f"out_scale is {scale.dtype}, and the kernel computes in torch.float32"
        return code_dtype(call) or condition(call)

    return refusal


def _in_codes(attend: Callable[..., Tensor], **args: Any) -> tuple[Tensor, Tensor]:
    """Return the codes (T, H * V) of an attention's result, and their scale, in a tensor of its own.

    For calls that `quantize_condition` lets pass.
    """
    del args["granularity"]
    scale, query, size = args.pop("out_scale"), args["query"], args["value"].shape[2]
    shape = (query.shape[0], query.shape[1], size)
    codes = torch.empty(shape, dtype=args.pop("dtype"), device=query.device)
    coding = Coding(codes, scale, torch.empty((), dtype=torch.float32, device=query.device))
    attend(**args, coding=coding)
    return codes.flatten(1), coding.used


def _is_decode(*, query: Tensor, key: Tensor, max_query_len: int, causal: bool = True, **_: Any) -> bool:
    return causal and decode_attention.serves(query.shape[1], key.shape[1], max_query_len)


attention = kernel_of(ATTENTION)(_attend)
rotary_attention = kernel_of(ROTARY_ATTENTION)(_turn_and_attend)
attention_quantize = kernel_of(ATTENTION_QUANTIZE)(partial(_in_codes, _attend))
rotary_attention_quantize = kernel_of(ROTARY_ATTENTION_QUANTIZE)(partial(_in_codes, _turn_and_attend))
