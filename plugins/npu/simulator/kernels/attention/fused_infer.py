"""Attention over pages: aclnnFusedInferAttentionScoreV2 to V4, query by query, in the forms TND and BSND.

The bounds that CANN documents for Atlas A2 and A3 are held: a call beyond them raises, as the kernel's own check would.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simulator.bounds import HALF, demand
from simulator.marshal import kernel

DEFAULT, ALL, UPPER_LEFT, LOWER_RIGHT, BAND = range(5)
MASK_SIZE = 2048


def _check_mask(mask: Tensor | None, sparse_mode: int) -> None:
    if sparse_mode in (LOWER_RIGHT, BAND):
        demand(mask is not None and tuple(mask.shape[-2:]) == (MASK_SIZE, MASK_SIZE), "the mask of 2048 by 2048")
        upper = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)
        demand(
            mask is not None and torch.equal(mask.to(torch.bool).view(upper.shape), upper), "a mask above the diagonal"
        )
    else:
        demand(sparse_mode == DEFAULT and mask is None, f"sparse mode {sparse_mode} is not simulated")


def _hidden(queries: int, keys: int, sparse_mode: int, before: int, behind: int) -> Tensor:
    """Return which keys each query does not see (queries, keys); the last query stands at the last key."""
    distance = torch.arange(keys)[None, :] - (torch.arange(queries)[:, None] + keys - queries)
    if sparse_mode == LOWER_RIGHT:
        return distance > 0
    if sparse_mode == BAND:
        return (distance > behind) | (distance < -before)
    return torch.zeros(queries, keys, dtype=torch.bool)


def _pages(cache: Tensor, row: Tensor, length: int, heads: int) -> Tensor:
    """Gather the first `length` positions of a sequence (length, heads, D) in fp32 from pages (N, P, heads * D)."""
    size = cache.shape[1]
    blocks = row[: -(-length // size)].to(torch.int64)
    return cache[blocks].reshape(-1, heads, cache.shape[2] // heads)[:length].to(torch.float32)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """Return (queries, heads, D) of one sequence, head by head; a query that sees nothing gives zeros."""
    out = torch.zeros(query.shape, dtype=torch.float32)
    group = query.shape[1] // keys.shape[1]
    for head in range(query.shape[1]):
        scores = query[:, head].to(torch.float32) @ keys[:, head // group].T * scale
        scores = scores.masked_fill(hidden, -math.inf)
        powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0))
        total = powers.sum(dim=-1, keepdim=True)
        # What a query does not see may hold anything, NaN too, and takes no part.
        weights = powers / total.masked_fill(total == 0, 1.0)
        seen = ~hidden.all(dim=0)
        out[:, head] = weights[:, seen] @ values[seen, head // group]
    return out


def _check_call(query: Tensor, cache: Tensor, packed: bool, sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, page = sizes
    size = query.shape[-1]
    demand(query.dtype in HALF and cache.dtype == query.dtype, f"query {query.dtype}, cache {cache.dtype}")
    demand(query.is_contiguous() and cache.is_contiguous(), "query and cache are contiguous")
    demand(heads <= 256 and heads % kv_heads == 0 and heads // kv_heads <= 64, f"{heads} and {kv_heads} heads")
    demand(tuple(cache.shape[1:]) == (page, kv_heads * size), f"pages {tuple(cache.shape)}")
    demand(cache.shape[2] <= 65535, "more than 65535 features in all heads")
    if packed:
        demand(size in (64, 128), f"TND with heads of {size} in pages")
        demand(page % 16 == 0 and page <= 1024, f"TND with pages of {page}")
    else:
        demand(query.shape[1] == 1, "BSND is simulated for one query each")
        demand(
            size % 16 == 0 and size <= 512 and page % 16 == 0 and 0 < page <= 512, f"heads of {size}, pages of {page}"
        )


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ends: list[int] | None,
    lengths: list[int] | None,
    table: Tensor | None,
    options: tuple[int, float, int, int, str, int, int, int],
    out: Tensor,
) -> None:
    heads, scale, before, behind, layout, kv_heads, sparse_mode, page = options
    kv_heads = kv_heads or heads
    demand(layout in ("TND", "BSND") and table is not None and lengths is not None, f"{layout}: not simulated")
    assert table is not None and lengths is not None
    demand(key.shape == value.shape, "key and value differ in shape")
    packed = layout == "TND"
    _check_call(query, key, packed, (heads, kv_heads, page))
    if packed:
        _check_mask(mask, sparse_mode)
        demand(ends is not None and ends == sorted(ends) and ends[0] >= 0, f"sequences end at {ends}")
        assert ends is not None
        demand(ends[-1] == query.shape[0], f"sequences end at {ends}, and there are {query.shape[0]} rows")
        demand(len(ends) <= 4096, "more than 4096 sequences")
    else:
        # One query each: neither mask nor mode nor ends are read.
        ends, sparse_mode = list(range(1, query.shape[0] + 1)), DEFAULT
    demand(len(lengths) == len(ends) == table.shape[0], f"{len(ends)} ends, {len(lengths)} lengths, {len(table)} rows")
    demand(table.dtype == torch.int32 and all(0 <= n <= table.shape[1] * page for n in lengths), f"lengths {lengths}")
    rows, results = query.view(-1, heads, query.shape[-1]), out.view(-1, heads, out.shape[-1])
    start = 0
    for index, end in enumerate(ends):
        hidden = _hidden(end - start, lengths[index], sparse_mode, before, behind)
        keys, values = (_pages(cache, table[index], lengths[index], kv_heads) for cache in (key, value))
        if end > start and lengths[index]:
            results[start:end] = _attend(rows[start:end], keys, values, scale, hidden).to(out.dtype)
        elif end > start:
            results[start:end] = 0
        start = end


def _score(num_ropes: int, *arguments: Any) -> None:
    query, (key,), (value,), pse, mask, ends, lengths = arguments[:7]
    quantisation, table, padding = arguments[7:14], arguments[14], arguments[15:17]
    rest, options = arguments[17 : 24 + num_ropes], arguments[24 + num_ropes :]
    heads, scale, before, behind, layout, kv_heads, sparse_mode, _precise, page, _mode, wants_lse, *_, out, _lse = (
        options
    )
    demand(all(each is None for each in (pse, *quantisation, *padding, *rest)) and not wants_lse, "not simulated")
    shown = (heads, scale, before, behind, layout, kv_heads, sparse_mode, page)
    _run(query, key, value, mask, ends, lengths, table, shown, out)


# Each version takes more tensors than the one before: rotary features first, then those of codes and sinks.
for _name, _num_ropes, _options in (
    ("V2", 0, "IDIICIIIIIbIITT"),
    ("V3", 3, "IDIICIIIIIbIITT"),
    ("V4", 5, "IDIICIIIIIbIIITT"),
):
    _spec = "TLLTTAA" + "T" * 15 + "TA" + "T" * _num_ropes + _options
    kernel(f"aclnnFusedInferAttentionScore{_name}", _spec)(partial(_score, _num_ropes))
