"""Random calls of paged and of dense attention."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32
from core.common.ops.attention.cache import stored
from core_conformance.fuzzing.source import Source

_Lens = list[tuple[int, int]]
"""New tokens and length of each sequence."""


def attention(source: Source) -> dict[str, Any]:
    """Draw a call of core::attention: any mix of decode, chunks and padding, unwritten cache rows holding NaN."""
    page, decode = source.one_of(4, 1, 16), source.one_of(False, True)
    lens: _Lens = []
    for _ in range(source.integer(1, 4)):
        new = 1 if decode else source.integer(1, 9)
        lens.append((new, new + source.integer(0, 20)))
    kv_heads, group, size = source.integer(1, 3), source.integer(1, 3), source.one_of(8, 16, 64, 128)
    value_size, window = source.one_of(size, 8), source.one_of(0, 1, 5)
    chunked = window > 0 and source.one_of(False, True)
    extra_tokens, extra_seqs = source.integer(0, 3), source.integer(0, 2)
    table, slots, num_blocks = _pages(source, lens, page, extra_seqs)
    num_tokens, num_seqs, most = len(slots) + extra_tokens, len(lens) + extra_seqs, max(new for new, _ in lens)
    caches = [source.dense(num_blocks, page, kv_heads, width) for width in (size, value_size)]
    _forget(caches, table, lens, window, chunked)
    scales: dict[str, Tensor | None] = {}
    if source.one_of(False, True):
        # Of codes: their scales are odd numbers, which put no value of half precision right between two of them.
        for name, index in (("k_scale", 0), ("v_scale", 1)):
            shape = source.one_of((), (kv_heads,))
            scale = source.dense(*shape, scale=0.0031, shift=0.0217, dtype=at_least_fp32(source.dtype)).abs()
            scales[name] = source.one_of(scale, None)
            caches[index] = stored(caches[index], torch.float8_e4m3fn, scales[name])
    starts = list(accumulate((new for new, _ in lens), initial=0))
    return {
        "query": source.tensor(num_tokens, kv_heads * group, size),
        "key": source.tensor(num_tokens, kv_heads, size),
        "value": source.tensor(num_tokens, kv_heads, value_size),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table.to(source.device),
        "slot_mapping": _padded(source, slots, num_tokens, 0, torch.int64),
        "seq_lens": _padded(source, [length for _, length in lens], num_seqs, 0, torch.int32),
        "query_starts": _padded(source, starts, num_seqs + 1, starts[-1], torch.int32),
        "scale": source.one_of(size**-0.5, 0.37),
        "window": window,
        "chunked": chunked,
        "softcap": source.one_of(0.0, 2.5),
        "sinks": source.maybe(kv_heads * group),
        "mask": _mask(source, num_tokens, source.one_of(1, kv_heads * group), table.shape[1] * page),
        "causal": chunked or source.one_of(True, False),
        "max_query_len": source.one_of(most, 0, most + 2),
        **scales,
    }


def _pages(source: Source, lens: _Lens, page: int, extra_seqs: int) -> tuple[Tensor, list[int], int]:
    """Return the block table, the slots of the new tokens, and the number of blocks, in random order."""
    each = max(-(-length // page) for _, length in lens)
    num_blocks = 1 + len(lens) * each
    table = torch.zeros(len(lens) + extra_seqs, each, dtype=torch.int32)
    table[: len(lens)] = (1 + source.order(num_blocks - 1)).view(len(lens), each)
    slots = [
        int(table[row, position // page]) * page + position % page
        for row, (new, length) in enumerate(lens)
        for position in range(length - new, length)
    ]
    return table, slots, num_blocks


def _forget(caches: list[Tensor], table: Tensor, lens: _Lens, window: int, chunked: bool) -> None:
    """Put NaN where nobody has written yet, past the end of each sequence, and before the window of its first query."""
    page = caches[0].shape[1]
    for row, (new, length) in enumerate(lens):
        first = length - new
        begin = first // window * window if chunked else max(first + 1 - window, 0)
        window_start = begin if window else 0
        for position in (*range(window_start), *range(length, table.shape[1] * page)):
            for cache in caches:
                cache[int(table[row, position // page]), position % page] = math.nan


def _padded(source: Source, data: list[int], length: int, fill: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(data + [fill] * (length - len(data)), dtype=dtype, device=source.device)


def _mask(source: Source, *shape: int) -> Tensor | None:
    """Draw a mask of this shape: none, one that hides, one that is added, or one that does both."""
    if source.integer(0, 2) < 2:
        return None
    kind = source.one_of("boolean", "added", "hiding")
    seen = source.booleans(*shape, share=0.7).to(source.device)
    if kind == "boolean":
        return seen
    added = source.dense(*shape)
    return added.masked_fill(~seen, -math.inf) if kind == "hiding" else added


def dense_attention(source: Source) -> dict[str, Any]:
    """Draw a call of core::dense_attention, with and without caches; rows that see nothing are among them."""
    batch, kv_heads, group = source.integer(1, 2), source.integer(1, 3), source.integer(1, 3)
    tokens, size, cached = source.integer(1, 9), source.one_of(8, 16, 64, 128), source.one_of(False, True)
    heads, value_size, total = kv_heads * group, source.one_of(size, 8), tokens + source.integer(0, 12)
    keys = tokens if cached else total
    call: dict[str, Any] = {
        "query": source.tensor(batch, heads, tokens, size),
        "key": source.tensor(batch, kv_heads, keys, size),
        "value": source.tensor(batch, kv_heads, keys, value_size),
        "scale": source.one_of(size**-0.5, 0.37),
        "mask": _mask(source, source.one_of(1, batch), source.one_of(1, heads), tokens, total),
        "causal": source.one_of(True, False),
        "window": source.one_of(0, 1, 3),
        "softcap": source.one_of(0.0, 2.5),
        "sinks": source.maybe(heads),
        "out_dtype": source.one_of(None, source.dtype, torch.float32),
    }
    if cached:
        call["key_cache"] = source.dense(batch, kv_heads, total, size)
        call["value_cache"] = source.dense(batch, kv_heads, total, value_size)
        start = source.integer(0, total - tokens)
        call["positions"] = torch.arange(start, start + tokens, device=source.device)
    return call
