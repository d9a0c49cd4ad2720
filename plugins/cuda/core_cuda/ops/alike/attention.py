"""`core::attention` whose every row is computed in one order, whatever the step holds beside it and however prompts are
cut: see `attention_kernel.py`. Single tokens, prompts, chunks and any mix of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.implementation import OpCall
from core_cuda.ops import launching
from core_cuda.ops.alike.attention_kernel import Form, attention_kernel, join_kernel
from core_cuda.ops.attention import prefill
from core_cuda.ops.cache_write import write_cache
from core_cuda.ops.registration import kernel_of

SEGMENT = 256
"""Positions that are summed from nothing: a program for each keeps the GPU busy from a few thousand of them on, and
joining them takes a prompt little of its time."""
_LARGEST_HEAD = 256
_MOST_BYTES = 256 * 1024 * 1024
"""Of what programs that share segments leave for each other; with more, one program takes all of a tile's."""
_LOG2_E = 1 / math.log(2)


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::attention`, or None."""
    args = call.args
    if not args["causal"]:
        return "it is not causal: what a token sees of its own prompt depends on how that is cut"
    for name in ("key_cache", "value_cache"):
        if args[name].dtype != args["query"].dtype:
            return f"{name} is {args[name].dtype} and query {args['query'].dtype}, and the kernel takes one dtype"
    size = max(args["query"].shape[2], args["value"].shape[2])
    if size > _LARGEST_HEAD:
        return f"heads have {size} features, and the kernel takes {_LARGEST_HEAD} at most"
    return prefill.why_not(call)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sharing: int | None = None,
    **_: Any,
) -> Tensor:
    """Do what `core::attention` does, for calls that `why_not` lets pass; returns (T, H, V), contiguous.

    sharing: how many programs share a tile's segments, 1 for none; chosen by the step's sizes where it is not given,
    which changes no bit.
    """
    write_cache(key, value, key_cache, value_cache, slot_mapping, query_starts)
    query, block_table = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, block_table))
    num_tokens, num_heads = query.shape[:2]
    num_kv_heads, value_size, num_seqs = key.shape[1], value.shape[2], seq_lens.shape[0]
    out = query.new_empty((num_tokens, num_heads, value_size))
    if num_tokens == 0:
        return out
    form = _form(query, value, key_cache, num_kv_heads, window=window > 0, softcap=softcap != 0)
    tokens = form.block_m // form.pack
    positions = block_table.shape[1] * form.page
    seen = min(positions, window + tokens + SEGMENT) if window else positions
    segments = triton.cdiv(seen, SEGMENT) + (1 if window else 0)
    parts = num_kv_heads * triton.cdiv(form.group, form.pack)
    if sharing is None:
        sharing = 2 * launching.num_multiprocessors() // (parts * max(num_seqs, num_tokens // tokens))
    taken = segments * num_tokens * num_heads * (value_size + 2)
    if min(sharing, segments) < 2 or 4 * taken > _MOST_BYTES:
        sharing = 1
    form = form._replace(shared=sharing > 1)
    partial = torch.empty(taken if form.shared else 0, dtype=torch.float32, device=query.device)
    grid = (parts, num_tokens // tokens + num_seqs + 1, min(sharing, segments))
    block_b = triton.next_power_of_2(num_seqs + 1)
    of_scores = scale / softcap if softcap else scale * _LOG2_E
    launching.launch(
        attention_kernel, grid, query, key_cache, value_cache, block_table, seq_lens, query_starts, sinks, out, partial,
        num_tokens, num_seqs, of_scores, softcap * _LOG2_E, window, *query.stride()[:2], *key_cache.stride()[1:3],
        *value_cache.stride()[1:3], block_table.stride(0), FORM=form, BLOCK_B=block_b, num_warps=_num_warps(form),
    )  # fmt: skip
    if form.shared:
        launching.launch(
            join_kernel, grid[:2], seq_lens, query_starts, sinks, out, partial, num_tokens, num_seqs, window,
            FORM=form, BLOCK_B=block_b, num_warps=_num_warps(form),
        )  # fmt: skip
    return out


attention_alike = kernel_of(ATTENTION, "alike")(attend)


def _form(query: Tensor, value: Tensor, key_cache: Tensor, num_kv_heads: int, *, window: bool, softcap: bool) -> Form:
    """Return the tiles for heads of these sizes, the same for every step."""
    size, value_size, group = query.shape[2], value.shape[2], query.shape[1] // num_kv_heads
    block_d, block_v = (max(16, triton.next_power_of_2(each)) for each in (size, value_size))
    wide = query.dtype == torch.float32  # on the ordinary units, which hold fewer numbers
    block_m, block_n = (16, 16) if wide else (64, 64 if max(block_d, block_v) <= 128 else 32)
    tile = block_n * (block_d + block_v) * query.element_size()
    room = launching.shared_bytes() - block_m * (block_d + block_n) * query.element_size()
    return Form(
        window=window,
        softcap=softcap,
        group=group,
        pack=min(triton.next_power_of_2(group), block_m),
        page=key_cache.shape[1],
        d=size,
        v=value_size,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_v=block_v,
        segment=SEGMENT,
        stages=1 if wide else max(min(3, room // tile), 1),
        shared=False,
    )


def _num_warps(form: Form) -> int:
    return 4 if max(form.block_d, form.block_v) <= 128 else 8
