"""Larger calls of the two attention ops, whose caches hold what nobody may read. See `opcalls.calls`.

Letters: T tokens of the step, B sequences, H query and K key/value heads, D head size, N blocks of P positions, M
blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Sample

_PAGE = 16


def paged_attention(draw: Draw) -> Iterator[Sample]:
    """Yield prefill, decode and both in one step, with padding and a window.

    NaN stands in every slot that holds no earlier token, those that this step writes included, and infinity in padding
    rows: who reads before writing, past a length or from a padding row shows it, and who writes one to a free slot.
    """
    mixed = ((21, 21), (1, 37), (5, 40))
    yield Sample(name="heads of 64, mixed", kwargs=_paged(draw, mixed))
    yield Sample(name="heads of 64, mixed and padded", kwargs=_paged(draw, mixed, padding=(5, 2)))
    decode = ((1, 33), (1, 16), (1, 1), (1, 50))
    options: dict[str, Any] = {"max_query_len": 1, "heads": (8, 2)}
    yield Sample(name="heads of 128, decode", kwargs=_paged(draw, decode, size=128, **options))
    yield Sample(
        name="heads of 64, decode with a window and padding",
        kwargs=_paged(draw, decode, padding=(3, 3), window=20, **options),
    )


def _paged(
    draw: Draw,
    lens: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (8, 2),
    size: int = 64,
    padding: tuple[int, int] = (0, 0),
    window: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Build one call. lens: (new tokens, length) of each sequence; padding: extra (tokens, sequences)."""
    device, (num_heads, num_kv_heads) = draw.device, heads
    width = max(-(-length // _PAGE) for _, length in lens)
    order = draw(len(lens) * width, dtype=torch.float64).argsort() + 1
    table = torch.zeros(len(lens) + padding[1], width, dtype=torch.int32)
    table[: len(lens)] = order.view(len(lens), width).cpu()
    slots = [_slot(table, i, p) for i, (new, length) in enumerate(lens) for p in range(length - new, length)]
    read = [_slot(table, i, p) for i, (new, length) in enumerate(lens) for p in _earlier(new, length, window)]
    num_tokens, num_seqs = len(slots) + padding[0], len(lens) + padding[1]
    starts = [0, *accumulate(new for new, _ in lens)]
    caches = [_holding(draw(1 + len(lens) * width, _PAGE, num_kv_heads, size), read) for _ in range(2)]
    rows = [draw(num_tokens, count, size) for count in (num_heads, num_kv_heads, num_kv_heads)]
    for tensor in rows:
        tensor[len(slots) :] = torch.inf

    def index(data: list[int], length: int, fill: int, dtype: torch.dtype) -> Tensor:
        return torch.tensor(data + [fill] * (length - len(data)), dtype=dtype, device=device)

    return {
        **dict(zip(("query", "key", "value"), rows, strict=True)),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table.to(device),
        "slot_mapping": index(slots, num_tokens, 0, torch.int64),
        "seq_lens": index([length for _, length in lens], num_seqs, 0, torch.int32),
        "query_starts": index(starts, num_seqs + 1, starts[-1], torch.int32),
        "scale": size**-0.5,
        "window": window,
        **options,
    }


def _slot(table: Tensor, sequence: int, position: int) -> int:
    return int(table[sequence, position // _PAGE]) * _PAGE + position % _PAGE


def _earlier(new: int, length: int, window: int) -> range:
    """Return the positions of earlier tokens that this step's first token may see."""
    first = length - new
    return range(max(0, first - window + 1) if window else 0, first)


def _holding(cache: Tensor, slots: list[int]) -> Tensor:
    """Return a cache that holds numbers in these slots and NaN in all others."""
    flat = cache.flatten(0, 1)
    index = torch.tensor(slots, dtype=torch.int64, device=cache.device)
    return torch.full_like(flat, torch.nan).index_copy_(0, index, flat[index]).view(cache.shape)


def dense_attention(draw: Draw) -> Iterator[Sample]:
    """Yield a causal prompt, and steps on caches whose hidden positions hold large numbers."""
    rows = {
        "query": draw(2, 33, 8, 64).transpose(1, 2),
        "key": draw(2, 33, 2, 64).transpose(1, 2),
        "value": draw(2, 33, 2, 64).transpose(1, 2),
    }
    yield Sample(name="heads of 64, causal", kwargs={**rows, "scale": 0.125, "causal": True})
    yield Sample(name="heads of 64, prefill", kwargs=_cached(draw, 33, 0, torch.bool))
    yield Sample(name="heads of 64, decode", kwargs=_cached(draw, 1, 40, draw.dtype))


def _cached(draw: Draw, num_tokens: int, start: int, mask: torch.dtype) -> dict[str, Any]:
    length = 64
    seen = torch.ones(num_tokens, length, dtype=torch.bool, device=draw.device).tril(start)
    lowest = torch.finfo(draw.dtype).min
    caches = [draw(2, 2, length, 64) for _ in range(2)]
    for cache in caches:
        cache[:, :, start:] *= 50  # what this step writes, and what nobody sees
    return {
        "query": draw(2, num_tokens, 8, 64).transpose(1, 2),
        "key": draw(2, 2, num_tokens, 64),
        "value": draw(2, 2, num_tokens, 64),
        "scale": 0.125,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "positions": torch.arange(start, start + num_tokens, device=draw.device),
        "mask": seen if mask == torch.bool else torch.zeros_like(seen, dtype=mask).masked_fill(~seen, lowest),
    }
