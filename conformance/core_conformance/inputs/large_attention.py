"""Larger calls of the two attention ops, whose caches hold NaN where nobody may read. See `opcalls.calls`.

Letters: T tokens of the step, B sequences, H query and K key/value heads, D head size, N blocks of P positions, M
blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.attention.cache import stored
from core.common.ops.declaration import Sample


def paged_attention(draw: Draw) -> Iterator[Sample]:
    """Yield prefill, decode and both in one step, with padding and a window.

    NaN stands in every slot that holds no earlier token, those that this step writes included, and infinity in padding
    rows: so an op that reads before writing, past a length or from a padding row is found, and one that writes padding
    to a free slot.
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
    yield Sample(name="codes, heads of 64, mixed and padded", kwargs=_of_codes(draw, mixed, padding=(5, 2)))
    yield Sample(name="codes, heads of 128, decode", kwargs=_of_codes(draw, decode, size=128, **options))


def _of_codes(draw: Draw, lens: tuple[tuple[int, int], ...], **options: Any) -> dict[str, Any]:
    """Return a call whose caches hold codes, of one scale for keys and one for each head of values."""
    call = _paged(draw, lens, **options)
    wide = at_least_fp32(draw.dtype)
    call["k_scale"] = torch.tensor(0.02137, dtype=wide, device=draw.device)
    heads = torch.arange(call["value"].shape[1], dtype=wide, device=draw.device)
    call["v_scale"] = 0.01291 + 0.00307 * heads
    for cache, scale in (("key_cache", "k_scale"), ("value_cache", "v_scale")):
        call[cache] = stored(call[cache], torch.float8_e4m3fn, call[scale])
    return call


def paged_attention_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield lengths, heads, pages and windows on both sides of usual tiles, and options that meet one another.

    Sizes come without options, so that a kernel that refuses an option is judged on all of them.
    """
    lens = ((1, 1030), (1, 257), (1, 129), (1, 128), *((1, 7 + 5 * i) for i in range(13)))
    sizes: dict[str, dict[str, Any]] = {
        "17 sequences up to 1030, 8 heads over 1": {"lens": lens, "heads": (8, 1), "max_query_len": 1},
        "prefill of 200, heads of 80": {"lens": ((65, 65), (129, 129), (200, 200)), "heads": (12, 4), "size": 80},
        "chunks, heads of 96, pages of 64": {"lens": ((70, 300), (1, 130)), "heads": (16, 2), "size": 96, "page": 64},
        "heads of 256, one each": {"lens": ((33, 33), (5, 140)), "heads": (8, 8), "size": 256, "page": 32},
        "window of 33, prefill": {"lens": ((70, 70), (20, 90)), "window": 33},
        "chunks of 33, prefill": {"lens": ((70, 70), (20, 90), (40, 106)), "window": 33, "chunked": True},
    }
    for name, call in sizes.items():
        yield Sample(name=name, kwargs=_paged(draw, **call))
    sinks = draw(8, shift=1.0)
    decode: dict[str, Any] = {"lens": ((1, 90), (1, 34), (1, 33)), "max_query_len": 1}
    crossed: dict[str, dict[str, Any]] = {
        "window of 33, decode": {"window": 33},
        "chunks of 33, decode": {"window": 33, "chunked": True},
        "soft cap, decode": {"softcap": 2.5},
        "sinks, decode": {"sinks": sinks},
        "window of 33 and soft cap, decode": {"window": 33, "softcap": 2.5},
        "window of 33 and sinks, decode": {"window": 33, "sinks": sinks},
    }
    for name, option in crossed.items():
        yield Sample(name=name, kwargs=_paged(draw, **decode, **option))
    mixed = ((40, 70), (1, 50))
    met: dict[str, dict[str, Any]] = {"soft cap": {"softcap": 2.5}, "sinks": {"sinks": sinks}}
    for name, option in met.items():
        yield Sample(name=f"window of 33 and {name}, mixed", kwargs=_paged(draw, mixed, window=33, **option))
    call = _paged(draw, mixed)
    yield Sample(name="scores over 100", kwargs={**call, "query": call["query"] * 40})


def paged_attention_far(draw: Draw) -> Iterator[Sample]:
    """Yield a step on more than 8,192 positions, and on more than 2**20 numbers of the cache."""
    lens = ((1, 8300), (1, 3))
    yield Sample(name="8300 positions, decode", kwargs=_paged(draw, lens, heads=(4, 2), page=64, max_query_len=1))


def _paged(
    draw: Draw,
    lens: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (8, 2),
    size: int = 64,
    page: int = 16,
    padding: tuple[int, int] = (0, 0),
    window: int = 0,
    chunked: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Build one call. lens: (new tokens, length) of each sequence; padding: extra (tokens, sequences)."""
    device, (num_heads, num_kv_heads) = draw.device, heads
    width = max(-(-length // page) for _, length in lens)
    order = draw(len(lens) * width, dtype=torch.float64).argsort() + 1
    table = torch.zeros(len(lens) + padding[1], width, dtype=torch.int32)
    table[: len(lens)] = order.view(len(lens), width).cpu()
    slots = [_slot(table, i, p, page) for i, (new, length) in enumerate(lens) for p in range(length - new, length)]
    read = [
        _slot(table, i, p, page) for i, (new, length) in enumerate(lens) for p in _earlier(new, length, window, chunked)
    ]
    num_tokens, num_seqs = len(slots) + padding[0], len(lens) + padding[1]
    starts = [0, *accumulate(new for new, _ in lens)]
    caches = [_holding(draw(1 + len(lens) * width, page, num_kv_heads, size), read) for _ in range(2)]
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
        "chunked": chunked,
        **options,
    }


def _slot(table: Tensor, sequence: int, position: int, page: int) -> int:
    return int(table[sequence, position // page]) * page + position % page


def _earlier(new: int, length: int, window: int, chunked: bool) -> range:
    """Return the positions of earlier tokens that this step's first token may attend to."""
    first = length - new
    if chunked:
        return range(first // window * window, first)
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


def dense_attention_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield a prompt of 129 with heads of 80, and a step on 257 positions with a head of 256 each."""
    rows = {name: draw(1, 129, heads, 80).transpose(1, 2) for name, heads in (("query", 16), ("key", 2), ("value", 2))}
    yield Sample(name="prompt of 129, heads of 80", kwargs={**rows, "scale": 80**-0.5, "causal": True})
    rows = {name: draw(2, 8, length, 256) for name, length in (("query", 1), ("key", 257), ("value", 257))}
    yield Sample(name="257 positions, heads of 256", kwargs={**rows, "scale": 0.0625, "causal": False})


def dense_attention_far(draw: Draw) -> Iterator[Sample]:
    """Yield a step on more than 8,192 positions."""
    rows = {"query": draw(1, 4, 1, 64), "key": draw(1, 2, 8300, 64), "value": draw(1, 2, 8300, 64)}
    yield Sample(name="8300 positions", kwargs={**rows, "scale": 0.125, "causal": False})


def _cached(draw: Draw, num_tokens: int, start: int, mask: torch.dtype) -> dict[str, Any]:
    length = 64
    seen = torch.ones(num_tokens, length, dtype=torch.bool, device=draw.device).tril(start)
    lowest = torch.finfo(draw.dtype).min
    caches = [draw(2, 2, length, 64) for _ in range(2)]
    for cache in caches:
        cache[:, :, start:] *= 50  # slots that this step writes, and slots that nobody sees
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
