"""Calls of ops at the sizes of models, for the scripts that time kernels and for the one that tunes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

DTYPE = torch.bfloat16
PAGE = 16
Heads = tuple[int, int, int]
"""Query heads, key/value heads, head size."""


def randn(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Return random data on the device; on the host, where nothing reads it, memory as it is."""
    if device == "cpu":
        return torch.empty(*shape, dtype=DTYPE)
    return torch.randn(*shape, device=device, dtype=DTYPE)


def paged(
    batch: int, new: int, context: int, heads: Heads, device: str = "cuda", *, codes: bool = False
) -> dict[str, Any]:
    """Return a call of `core::attention`: `batch` sequences of `context` tokens, of which `new` are this step's.

    codes: whether the caches hold fp8 codes, which stand for themselves.
    """
    num_heads, num_kv, size = heads
    blocks = -(-context // PAGE)
    table = 1 + torch.randperm(batch * blocks, device=device, dtype=torch.int32).view(batch, blocks)
    positions = torch.arange(context - new, context, device=device)
    slots = table.long()[:, positions // PAGE] * PAGE + positions % PAGE
    caches = [randn(1 + batch * blocks, PAGE, num_kv, size, device=device) for _ in range(2)]
    if codes:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    return {
        "query": randn(batch * new, num_heads, size, device=device),
        "key": randn(batch * new, num_kv, size, device=device),
        "value": randn(batch * new, num_kv, size, device=device),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table,
        "slot_mapping": slots.flatten(),
        "seq_lens": torch.full((batch,), context, device=device, dtype=torch.int32),
        "query_starts": torch.arange(batch + 1, device=device, dtype=torch.int32) * new,
        "scale": size**-0.5,
        "max_query_len": 1 if new == 1 else 0,
    }


def moved_bytes(batch: int, new: int, context: int, heads: Heads, *, codes: bool = False) -> int:
    """Return the bytes that such a call must move: keys and values once, queries in and results out."""
    return 2 * batch * heads[1] * heads[2] * context * (1 if codes else 2) + 2 * 2 * batch * new * heads[0] * heads[2]


def dense(call: Mapping[str, Any], new: int, context: int) -> torch.Tensor:
    """Return the same attention by torch over gathered keys and values, the step's own included; (T, H, D).

    new: 1, or all of the context; torch knows no causal order from below.
    """
    batch = call["seq_lens"].shape[0]
    keys, values = (
        call[name].to(DTYPE)[call["block_table"].long()].flatten(1, 2)[:, :context].clone()
        for name in ("key_cache", "value_cache")
    )
    kept = call["key_cache"].dtype
    keys[:, context - new :] = call["key"].to(kept).to(DTYPE).unflatten(0, (batch, new))
    values[:, context - new :] = call["value"].to(kept).to(DTYPE).unflatten(0, (batch, new))
    query = call["query"].unflatten(0, (batch, new)).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        query, keys.transpose(1, 2), values.transpose(1, 2), is_causal=new > 1, enable_gqa=True, scale=call["scale"]
    )
    return out.transpose(1, 2).flatten(0, 1)
