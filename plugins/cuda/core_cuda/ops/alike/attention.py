"""`core::attention`, plain and behind a rotation, whose every row is computed in one order, whatever the step holds
beside it and however prompts are cut: see `attention_kernel.py`. Single tokens, prompts, chunks and any mix of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.implementation import OpCall
from core_cuda.ops import launching
from core_cuda.ops.alike.attention_kernel import Form, alike_attention_kernel, join_kernel
from core_cuda.ops.attention import prefill
from core_cuda.ops.cache_write import write_cache
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rotary.rotation import RotaryConfig, rotate_and_write

SEGMENT = 256
"""Positions that are summed from nothing: a program for each keeps the GPU busy from a few thousand of them on, and
joining them takes a prompt little of its time."""
_LARGEST_HEAD = 256
_EVEN = 16  # as for other norms (norms.py); heads of 72 features had other bits alone, in fp32 on an H200
_MOST_BYTES = 256 * 1024 * 1024
"""Of what programs that share segments leave for each other; with more, one program takes all of a tile's."""
_LOG2_E = 1 / math.log(2)
_TURNING = RotaryConfig(rows=8, num_warps=2)
_OPTIONS = ("scale", "window", "chunked", "softcap", "sinks", "sharing")
_PLACES = ("key_cache", "value_cache", "block_table", "slot_mapping", "seq_lens", "query_starts")


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::attention`, or None."""
    args = call.args
    if not args.get("causal", True):
        return "it is not causal: what a token sees of its own prompt depends on how that is cut"
    for name in ("key_cache", "value_cache"):
        if args[name].dtype != args["query"].dtype:
            return f"{name} is {args[name].dtype} and query {args['query'].dtype}, and the kernel takes one dtype"
    size = max(args["query"].shape[2], args["value"].shape[2])
    if size > _LARGEST_HEAD:
        return f"heads have {size} features, and the kernel takes {_LARGEST_HEAD} at most"
    return prefill.why_not(call)


def rotary_condition(call: OpCall) -> str | None:
    """Return why the kernels can't take a call of `core::rotary_attention`, or None."""
    size = call.args["query"].shape[2]
    if call.args["normalize"] and size % _EVEN:
        return f"heads of {size} features are normed, one alone in another order unless they are a multiple of {_EVEN}"
    return why_not(call) or prefill.why_not_rotary(call)


def write_and_attend(query: Tensor, key: Tensor, value: Tensor, *places: Tensor, **options: Any) -> Tensor:
    """Do what `core::attention` does, for calls that `why_not` lets pass; returns (T, H, V), contiguous.

    places: the two caches, block_table, slot_mapping, seq_lens, query_starts. options: those of `attend`.
    """
    key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts = places
    write_cache(key, value, key_cache, value_cache, slot_mapping, query_starts)
    return attend(query, key_cache, value_cache, block_table, seq_lens, query_starts, **options)


def turn_and_attend(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *places: Tensor, **options: Any
) -> Tensor:
    """Do the same behind the rotation of `core::rotary_attention`, which writes the cache, for calls that
    `rotary_condition` lets pass; heads are normed by the same number of threads in every call."""
    key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts = places
    attention = {name: options.pop(name) for name in _OPTIONS if name in options}
    written = (key_cache, value_cache, slot_mapping, query_starts)
    query, _, _ = rotate_and_write(query, key, value, cos, sin, *written, config=_TURNING, **options)
    return attend(query, key_cache, value_cache, block_table, seq_lens, query_starts, **attention)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sharing: int | None = None,
) -> Tensor:
    """Return attention (T, H, V) over caches that hold this step's keys and values, as `core::attention` says.

    sharing: how many programs share a tile's segments, 1 for none; chosen by the step's sizes where it is not given,
    which changes no bit.
    """
    query, block_table = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, block_table))
    num_tokens, num_heads = query.shape[:2]
    num_kv_heads, value_size, num_seqs = *value_cache.shape[2:], seq_lens.shape[0]
    out = query.new_empty((num_tokens, num_heads, value_size))
    if num_tokens == 0:
        return out
    form = _form(query, value_cache, window=window > 0, chunked=chunked, softcap=softcap != 0)
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
        alike_attention_kernel, grid, query, key_cache, value_cache, block_table, seq_lens, query_starts, sinks, out,
        partial, num_tokens, num_seqs, of_scores, softcap * _LOG2_E, window, *query.stride()[:2],
        *key_cache.stride()[1:3], *value_cache.stride()[1:3], block_table.stride(0),
        FORM=form, BLOCK_B=block_b, num_warps=_num_warps(form),
    )  # fmt: skip
    if form.shared:
        launching.launch(
            join_kernel, grid[:2], seq_lens, query_starts, sinks, out, partial, num_tokens, num_seqs, window,
            FORM=form, BLOCK_B=block_b, num_warps=_num_warps(form),
        )  # fmt: skip
    return out


def _taken(run: Callable[..., Tensor], **args: Any) -> Tensor:
    """Call with the arguments of the op by name, of which those are left out that no kernel here needs."""
    places = [args.pop(name) for name in _PLACES]
    for name in ("mask", "causal", "max_query_len", "k_scale", "v_scale"):
        args.pop(name, None)
    first = [args.pop(name) for name in ("query", "key", "value", "cos", "sin") if name in args]
    return run(*first, *places, **args)


attention_alike = kernel_of(ATTENTION, "alike")(partial(_taken, write_and_attend))
rotary_attention_alike = kernel_of(ROTARY_ATTENTION, "alike")(partial(_taken, turn_and_attend))


def _form(query: Tensor, value_cache: Tensor, *, window: bool, chunked: bool, softcap: bool) -> Form:
    """Return the tiles for heads of these sizes, the same for every step."""
    page, num_kv_heads, value_size = value_cache.shape[1:]
    size, group = query.shape[2], query.shape[1] // num_kv_heads
    block_d, block_v = (max(16, triton.next_power_of_2(each)) for each in (size, value_size))
    wide = query.dtype == torch.float32  # on the ordinary units, which hold fewer numbers
    block_m, block_n = (16, 16) if wide else (64, 64 if max(block_d, block_v) <= 128 else 32)
    tile = block_n * (block_d + block_v) * query.element_size()
    room = launching.shared_bytes() - block_m * (block_d + block_n) * query.element_size()
    return Form(
        window=window,
        chunked=chunked,
        softcap=softcap,
        group=group,
        pack=min(triton.next_power_of_2(group), block_m),
        page=page,
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
