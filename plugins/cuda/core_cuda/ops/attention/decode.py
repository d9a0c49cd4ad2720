"""Paged attention for few new tokens per sequence (decode, verifying drafts): sizes, configuration, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_cuda.ops import launching
from core_cuda.ops.attention.decode_config import (
    MIN_TILE,
    DecodeConfig,
    DecodeShape,
    choose,
    join_ratio,
    measured,
    most_shares,
    why_no_room,
)
from core_cuda.ops.attention.decode_kernel import decode_kernel
from core_cuda.ops.attention.decode_plan import MOST_PARTS
from core_cuda.ops.attention.rotation import Rotation, Turning
from core_cuda.ops.cache_write import head_stride, why_not_dtypes
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.workspace import counters

MAX_ROWS = 64
"""Rows of one tile: query heads of a key/value head times new tokens of a sequence."""

MAX_HEAD_SIZE = 512

_JOINED_AT_ONCE = 64  # fp32 values of partial results that a thread joins at a time; 8192 of a program with 2 warps
_BLOCK_B = 32  # sequences up to which the kernel that plans for them is the same: a warp reduces so many by itself


@dataclass(frozen=True, slots=True)
class Coding:
    """The buffers for a result in codes, and the scale of the codes."""

    #: (T, H, V), written by the kernel
    codes: Tensor
    #: () fp32, the scale of the codes
    scale: Tensor
    #: () fp32; the kernel copies the scale here
    used: Tensor


def serves(num_heads: int, num_kv_heads: int, max_query_len: int) -> bool:
    """Return whether `decode` takes a call: the maximum of new tokens per sequence is known and small."""
    return 0 < max_query_len * (num_heads // num_kv_heads) <= MAX_ROWS


def why_not(call: OpCall) -> str | None:
    """Return why `decode` cannot take a call that `serves` accepts, or None; a rotation before it does not matter."""
    args = call.args
    if args.get("mask") is not None:
        return "it has a mask, and the kernel takes none"
    query, sinks = args["query"], args["sinks"]
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if reason := why_not_dtypes(call):
        return reason
    if sinks is not None and sinks.dtype not in DTYPES:
        return f"sinks are {sinks.dtype}, and the kernel computes in torch.float32"
    for name in ("key_cache", "value_cache"):
        size, strides = args[name].shape[3], tuple(args[name].stride())
        if size > MAX_HEAD_SIZE:
            return f"heads of {name} have {size} features, and the kernel takes {MAX_HEAD_SIZE} at most"
        if strides[3] != 1:
            return f"{name} has strides {strides}, and the kernel takes the features of a head in one run of memory"
    sizes = shape_of(query, args["value"], args["key_cache"], args["block_table"], 0, args["max_query_len"])
    return why_no_room(sizes)


def shape_of(
    query: Tensor, value: Tensor, key_cache: Tensor, block_table: Tensor, window: int, max_query_len: int
) -> DecodeShape:
    """Return the shape of a call whose sizes are all known."""
    num_kv_heads, head_size = key_cache.shape[2:]
    positions = block_table.shape[1] * key_cache.shape[1]
    return DecodeShape(
        num_seqs=block_table.shape[0],
        num_kv_heads=num_kv_heads,
        num_rows=max_query_len * (query.shape[1] // num_kv_heads),
        head_size=head_size,
        value_size=value.shape[2],
        num_positions=min(positions, window + max_query_len) if window else positions,
        # In half precision a tile holds numbers as the cache does, and codes take half the bytes. A query of fp32 makes
        # products of fp32, whatever the cache holds.
        itemsize=key_cache.itemsize if query.itemsize <= 2 else query.itemsize,
    )


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor | None,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_query_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    turning: Turning | None = None,
    coding: Coding | None = None,
    prompts: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Write key and value into the cache and attend, as `core::attention` says; return (T, H, V), contiguous.

    One launch, for calls that `serves` accepts. Padding tokens are not written to the cache.

    - turning: the norm and rotation of `core::rotary_attention`; the kernel applies them as it reads query and key.
    - coding: return the result as codes, in `coding.codes`.
    - prompts: the result of a step with prompts, which is returned. Only the rows of sequences with at most
      max_query_len new tokens are written, and no cache, so that slot_mapping may be None. Of a cache of codes, key and
      value are these as numbers, as `write_cache` returns them.
    - config: by default the fastest that was measured, else that of `choose`.
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_size = value.shape[1:]
    out = prompts if coding is None else coding.codes
    if out is None:
        out = query.new_empty((num_tokens, num_heads, value_size))
    num_seqs = block_table.shape[0]
    if num_seqs == 0 or num_tokens == 0:
        if coding is not None:
            coding.used.copy_(coding.scale)
        return out.zero_()
    query, key, value, block_table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, block_table)
    )
    shape = shape_of(query, value, key_cache, block_table, window, max_query_len)
    config = config or measured(shape) or choose(shape)
    parts = num_kv_heads * config.helpers * MOST_PARTS.value
    partial = torch.empty((parts, shape.num_rows, value_size), dtype=torch.float32, device=query.device)
    stats = torch.empty((parts, 2, shape.num_rows), dtype=torch.float32, device=query.device)
    arrived = counters(num_seqs * num_kv_heads, query.device)
    turn = turning or Turning(out, out, None, None, 0.0, 0.0, Rotation())  # any pointer, since nothing is read
    optional = (out if x is None else x.contiguous() for x in (sinks, turn.query_weight, turn.key_weight))
    launching.launch(
        decode_kernel,
        (num_kv_heads, num_seqs + config.helpers),
        *(query, key, value, key_cache, value_cache, block_table),
        *(x if x is None else x.contiguous() for x in (slot_mapping, seq_lens, query_starts)),
        *(*optional, turn.cos, turn.sin, out, partial, stats, arrived, k_scale, v_scale),
        *((None, None) if coding is None else (coding.scale, coding.used)),
        *(num_tokens, num_seqs, key_cache.shape[0], block_table.shape[1], join_ratio(shape, config)),
        *(scale if softcap else scale * math.log2(math.e), window, turn.eps, turn.offset),
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        *(stride for x in (key_cache, value_cache) for stride in x.stride()[:3]),
        *(x.stride(0) for x in (block_table, turn.cos, turn.sin)),
        **tiles(shape, config, max_query_len),
        PAGE=key_cache.shape[1],
        WINDOWED=window > 0,
        CHUNKED=chunked,
        SOFTCAP=abs(softcap),
        SINKS=sinks is not None,
        FETCH=config.fetch,
        ROTATION=turn.rotation,
        K_SCALE=head_stride(k_scale),
        V_SCALE=head_stride(v_scale),
        AMONG_PROMPTS=prompts is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def tiles(shape: DecodeShape, config: DecodeConfig, max_new: int) -> dict[str, int]:
    """Return the kernel's constants that are sizes.

    Blocks are powers of two; in products, at least `MIN_TILE`.
    """
    rows, new = triton.next_power_of_2(shape.num_rows), triton.next_power_of_2(max_new)
    block_v = max(triton.next_power_of_2(shape.value_size), MIN_TILE)
    joined = max(_JOINED_AT_ONCE * 32 * (4 if config.num_warps == 2 else config.num_warps) // (rows * block_v), 1)
    return {
        "D": shape.head_size,
        "V": shape.value_size,
        "GROUP": shape.num_rows // max_new,
        "MAX_NEW": max_new,
        "SHARED": config.helpers > 0,
        "BLOCK_D": max(triton.next_power_of_2(shape.head_size), MIN_TILE),
        "BLOCK_V": block_v,
        "BLOCK_N": config.block_n,
        "BLOCK_ROWS": rows,
        "COPIES": max(MIN_TILE // rows, 1),
        "BLOCK_NEW": new,
        "NEW_COPIES": max(MIN_TILE // new, 1),
        "BLOCK_GROUP": triton.next_power_of_2(shape.num_rows // max_new),
        "BLOCK_B": max(triton.next_power_of_2(shape.num_seqs), _BLOCK_B),
        "PARTS": min(triton.next_power_of_2(most_shares(shape, config)), joined),
    }
