"""`core::dense_attention`: attention over a dense key/value cache, or over key and value alone.

Shapes: B sequences, H query heads, K key/value heads (H a multiple of K: head h reads head h // (H / K)), T tokens of
this step, S positions attended over, D head size of query and key, V head size of value.

It is what attention in a foreign graph means, `core::attention` being that of an engine with a paged cache: query,
repeated keys and values, mask and cache write as one op, whichever way the model spells them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_ranks
from core.common.ops.attention.scores import exponentials, soft_capped
from core.common.ops.declaration import CanonicalOp, declare


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Write key and value into the caches if there are any, then attend; returns (B, H, T, V) in out_dtype.

    query (B, H, T, D). Without caches: key (B, K, S, D), value (B, K, S, V). With caches: key (B, K, T, D) and value
    (B, K, T, V) are written at positions (T,) int64 along dimension 2 of key_cache (B, K, S, D) and value_cache
    (B, K, S, V), cast to their dtypes, and all S positions are attended over: what is hidden there, the mask says.

    softmax(softcap(scale * query @ key.T) + mask) @ value. mask: broadcasts against (B, H, T, S); added to the scores,
    or, if boolean, hides a position where it is false. causal: a token sees positions up to its own; window: and only
    that many of the latest, itself included, 0 for all. A token's own position is that in `positions`, without it its
    row. softcap: `c * tanh(score / c)`, 0 for none. sinks (H,), or broadcasting against (B, H, T, 1): one more logit in
    the softmax's denominator. Rows hidden by -inf or false everywhere become zero; a row hidden by the lowest finite
    number everywhere becomes the mean of all values, as in any softmax. out_dtype: the value's by default. Scores and
    sums are in fp32, in fp64 for an fp64 query. Memory order of the result: (B, T, H, V), as projections read it.
    """
    if key_cache is not None and value_cache is not None and positions is not None:
        key = key_cache.index_copy_(2, positions, key.to(key_cache.dtype))
        value = value_cache.index_copy_(2, positions, value.to(value_cache.dtype))
    acc = at_least_fp32(query.dtype)
    num_heads, num_tokens, num_kv_heads = query.shape[1], query.shape[2], key.shape[1]
    # The heads of a group lie one after the other: side by side with the tokens, they need no copies of the keys.
    grouped = query.to(acc).unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).flatten(2, 3)
    scores = torch.matmul(grouped, key.to(acc).transpose(2, 3)) * scale
    scores = soft_capped(scores.view(query.shape[0], num_heads, num_tokens, key.shape[2]), softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(acc)
    if causal or window:
        scores = scores.masked_fill(~_visible(scores, positions, causal=causal, window=window), -math.inf)
    if sinks is not None and sinks.dim() == 1:
        sinks = sinks.view(-1, 1, 1)
    weights, total = exponentials(scores, sinks)
    out = torch.matmul(weights.reshape(*grouped.shape[:3], key.shape[2]), value.to(acc))
    # Divided last: one rounding for each result in place of one for each weight.
    return _empty(query, value, out_dtype).copy_(out.view(*query.shape[:3], value.shape[3]) / total)


def _visible(scores: Tensor, positions: Tensor | None, *, causal: bool, window: int) -> Tensor:
    """Return (T, S) bool: which positions a token sees."""
    own = torch.arange(scores.shape[2], device=scores.device) if positions is None else positions
    distance = own[:, None] - torch.arange(scores.shape[3], device=scores.device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance < window) if window else seen


def _empty(query: Tensor, value: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    sizes = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_empty(sizes, dtype=out_dtype or value.dtype).transpose(1, 2)


def _fake(query: Tensor, key: Tensor, value: Tensor, *, out_dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _empty(query, value, out_dtype)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> None:
    op = "dense_attention"
    tensors = {"query": query, "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    check_ranks(op, 4, **tensors)
    check_floating(op, sinks=sinks, **tensors)
    heads, kv_heads = query.shape[1], key.shape[1]
    check(kv_heads == value.shape[1], op, f"{kv_heads} key heads and {value.shape[1]} value heads differ")
    check(heads % kv_heads == 0, op, f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    check(query.shape[3] == key.shape[3], op, "query and key differ in head size")
    check(query.shape[0] == key.shape[0] == value.shape[0], op, "query, key and value differ in batch size")
    check(key.shape[2] == value.shape[2], op, "key and value differ in length")
    given = [tensor is not None for tensor in (key_cache, value_cache, positions)]
    check(len(set(given)) == 1, op, "key_cache, value_cache and positions come together or not at all")
    if key_cache is not None and value_cache is not None and positions is not None:
        _check_caches(key, value, key_cache, value_cache, positions)
    check(mask is None or mask.dim() <= 4, op, "mask must have at most rank 4")
    kinds = mask is None or mask.dtype == torch.bool or mask.is_floating_point()
    check(kinds, op, "mask must be boolean or floating-point")
    check(sinks is None or sinks.dim() in (1, 4), op, "sinks must have rank 1 or 4")


def _check_caches(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor) -> None:
    op = "dense_attention"
    check(positions.dtype == torch.int64, op, "positions must be torch.int64")
    check(positions.dim() == 1 and positions.shape[0] == key.shape[2], op, "positions must be one for each new key")
    check(key_cache.shape[2] == value_cache.shape[2], op, "the caches differ in length")
    for new, cache in ((key, key_cache), (value, value_cache)):
        alike = all(new.shape[dim] == cache.shape[dim] for dim in (0, 1, 3))
        check(alike, op, "cache and key/value differ in batch size, heads or head size")


def _call(
    draw: Draw,
    *,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (5, 11),
    sizes: tuple[int, int] = (16, 16),
    start: int | None = None,
    batch: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Return one call.

    lengths: T and S. start: the first position to write, None for no cache. options: arguments of the op.
    """
    (num_heads, kv_heads), (num_tokens, num_keys), (size, value_size) = heads, lengths, sizes
    length = num_keys if start is None else num_tokens
    call = {
        "query": draw(batch, num_tokens, num_heads, size).transpose(1, 2),
        "key": draw(batch, kv_heads, length, size),
        "value": draw(batch, length, kv_heads, value_size).transpose(1, 2),
        "scale": size**-0.5,
    }
    if start is not None:
        call["key_cache"] = draw(batch, kv_heads, num_keys, size)
        call["value_cache"] = draw(batch, kv_heads, num_keys, value_size)
        call["positions"] = torch.arange(start, start + num_tokens, device=draw.device)
    return call | options


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return calls with and without caches: grouped heads, masks of each kind, window, soft-cap, sinks, hidden rows."""
    dtype, device = draw.dtype, draw.device

    def tril(num_tokens: int, num_keys: int, start: int = 0) -> Tensor:
        return torch.ones(num_tokens, num_keys, dtype=torch.bool, device=device).tril(start)

    def hiding(seen: Tensor) -> Tensor:
        return torch.zeros(5, 11, dtype=dtype, device=device).where(seen, torch.finfo(dtype).min)

    def ramp(first: float, last: float, count: int) -> Tensor:
        return torch.linspace(first, last, count, dtype=torch.float64).to(dtype).to(device)

    seen, hidden = tril(5, 11, 3), tril(5, 11, -2)
    per_head = torch.arange(220, device=device).view(1, 4, 5, 11) % 3 != 1
    return {
        "no cache, no mask": _call(draw),
        "decode": _call(draw, lengths=(1, 13), start=6, mask=tril(1, 13, 6)[None, None]),
        "prefill": _call(draw, lengths=(7, 13), start=0, mask=tril(7, 13).expand(2, 1, -1, -1)),
        "chunk, causal": _call(draw, lengths=(3, 12), start=5, causal=True),
        "window 3": _call(draw, lengths=(9, 9), causal=True, window=3),
        "window 4 with a cache": _call(draw, lengths=(3, 12), start=6, causal=True, window=4),
        "soft-cap": _call(draw, softcap=2.5, mask=seen),
        "odd scale, value size 8": _call(draw, sizes=(16, 8), scale=0.37),
        "one kv head": _call(draw, heads=(6, 1), lengths=(4, 9), start=2, mask=tril(4, 9, 2)),
        "one sequence, as many kv heads": _call(draw, heads=(3, 3), batch=1),
        "additive mask": _call(draw, mask=hiding(seen)),
        "additive mask per head": _call(draw, mask=ramp(-3, 3, 220).view(1, 4, 5, 11)),
        "boolean mask per head": _call(draw, mask=per_head),
        "row hidden by false": _call(draw, mask=hidden),
        "row hidden by the lowest number": _call(draw, mask=hiding(hidden)),
        "sinks": _call(draw, sinks=ramp(-1, 2, 4), mask=seen),
        "sinks per token": _call(draw, mask=hidden) | {"sinks": draw(2, 4, 5, 1)},
        "wide query, narrow result": _call(draw, out_dtype=torch.bfloat16),
        "no tokens": _call(draw, lengths=(0, 11)),
    }


DENSE_ATTENTION = declare(
    CanonicalOp(
        schema="dense_attention(Tensor query, Tensor key, Tensor value, *, float scale, Tensor(a!)? key_cache=None, "
        "Tensor(b!)? value_cache=None, Tensor? positions=None, Tensor? mask=None, bool causal=False, int window=0, "
        "float softcap=0.0, Tensor? sinks=None, ScalarType? out_dtype=None) -> Tensor",
        reference=reference,
        fake=_fake,
        check=_check,
        calls=_calls,
        break_point=True,
        costly=True,
    )
)
