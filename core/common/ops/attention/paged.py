"""`core::attention`: causal attention over a paged key/value cache, cache write included.

Shapes: T tokens of this step (all sequences concatenated), B sequences, H query heads, K key/value heads (H a multiple
of K), D head size of query and key, V head size of value, N cache blocks of P positions, M blocks per sequence at most.

Block 0 is the null block: no sequence owns it, padding tokens write there, and nothing reads it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import at_least_fp32, check, check_ranks
from core.common.ops.attention.cache import check_scales, read
from core.common.ops.attention.cache import write_cache as write_cache  # devices' own kernels write by it too
from core.common.ops.attention.eager import by_sequence
from core.common.ops.attention.samples import calls as calls  # behind a rotation too
from core.common.ops.attention.samples import step_indices
from core.common.ops.attention.scores import exponentials, soft_capped
from core.common.ops.declaration import CanonicalOp, declare


def reference(
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
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    max_query_len: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write key and value into the cache, then attend; returns (T, H, V) in the query's dtype.

    query (T, H, D); key (T, K, D); value (T, K, V); key_cache (N, P, K, D) and value_cache (N, P, K, V), written at
    slot_mapping (T,) int64 = block * P + position in block. block_table (B, M) int32: blocks of each sequence in
    order. seq_lens (B,) int32: length of each sequence, this step's tokens included; 0 for padding. query_starts
    (B + 1,) int32: first token of each sequence in T, then the number of real tokens; later rows are padding and come
    back as zero. A sequence's tokens are the last of its positions.

    window: number of latest positions a token sees, itself included; 0 for all. chunked: windows lie side by side from
    the sequence's beginning instead, and a token at position p sees those from p // window * window on (Llama 4).
    softcap: `c * tanh(score / c)`; 0 for none (Gemma 2, arXiv 2408.00118). sinks (H,): one extra logit per head in the
    softmax's denominator (Xiao et al., arXiv 2309.17453, as gpt-oss uses it). mask (T, 1 or H, M * P), over the token's
    own sequence: added to the scores, or, if boolean, hides a key position where it is false. max_query_len: upper
    bound on tokens per sequence in this step, 0 if unknown; 1 in decode. Softmax accumulates in fp32 (fp64 for fp64
    input).

    k_scale, v_scale: () or (K,) fp32, of caches of float8_e4m3fn, which hold codes (`stored`): value = code * scale;
    None for 1. All keys and values are read back from the cache, this step's too: a token attends to the same codes
    whether they were written by its own step, by an earlier one or by another chunk of its prompt.
    """
    write_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = key_cache.shape[2]
    acc = at_least_fp32(query.dtype)

    keys = key_cache[block_table.long()].flatten(1, 2)  # (B, M * P, K, D)
    values = value_cache[block_table.long()].flatten(1, 2)
    query_lens = query_starts[1:] - query_starts[:-1]
    steps = torch.arange(max_query_len or num_tokens, device=query.device)
    rows = (query_starts[:-1, None] + steps).clamp(max=num_tokens - 1)  # (B, Q) row of each query in T
    padded = query[rows].unflatten(2, (num_kv_heads, num_heads // num_kv_heads))  # (B, Q, K, G, D)

    positions = (seq_lens - query_lens)[:, None] + steps  # (B, Q)
    allowed = visible_positions(positions, seq_lens, keys.shape[1], window=window, chunked=chunked, causal=causal)
    live = allowed.any(1)
    scores = torch.einsum("bqkgd,bskd->bkgqs", padded.to(acc), read(keys, acc, k_scale)) * scale
    scores = soft_capped(scores, softcap)
    scores, allowed = _apply_mask(scores, allowed[:, None, None], mask, rows)
    own_sinks = None if sinks is None else sinks.view(1, num_kv_heads, -1, 1, 1)
    weights, total = exponentials(scores.masked_fill(~allowed, -math.inf), own_sinks)
    # Positions that nobody wrote, or that left the window, may hold NaN, and 0 * NaN is NaN: hide their values too.
    values = read(values, acc, v_scale).masked_fill(~live[:, :, None, None], 0.0)
    out = torch.einsum("bkgqs,bskv->bqkgv", weights / total, values).flatten(2, 3)  # (B, Q, H, V)
    return _to_tokens(out, query_starts, num_tokens).to(query.dtype)


def visible_positions(
    positions: Tensor, seq_lens: Tensor, num_keys: int, *, window: int, chunked: bool, causal: bool
) -> Tensor:
    """Return which keys each query may see: (B, Q, num_keys) bool from positions (B, Q) and seq_lens (B,)."""
    keys = torch.arange(num_keys, device=positions.device)
    allowed = (keys < seq_lens[:, None])[:, None, :].expand(-1, positions.shape[1], -1)
    if causal:
        allowed = allowed & (keys <= positions[..., None])
    if window:
        first = positions // window * window if chunked else positions - window + 1
        allowed = allowed & (keys >= first[..., None])
    return allowed


def _apply_mask(scores: Tensor, allowed: Tensor, mask: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    if mask is None:
        return scores, allowed
    num_kv_heads, group = scores.shape[1], scores.shape[2]
    own = mask[rows].transpose(1, 2)  # (B, 1 or H, Q, S)
    own = own.unflatten(1, (num_kv_heads, group)) if own.shape[1] > 1 else own[:, :, None]
    if mask.dtype == torch.bool:
        return scores, allowed & own
    return scores + own.to(scores.dtype), allowed


def _to_tokens(out: Tensor, query_starts: Tensor, num_tokens: int) -> Tensor:
    """Gather (B, Q, H, V) back to (T, H, V); rows past the last real token become zero."""
    tokens = torch.arange(num_tokens, device=out.device)
    sequence = torch.bucketize(tokens, query_starts[1:], right=True).clamp(max=out.shape[0] - 1)
    step = (tokens - query_starts[:-1][sequence]).clamp(0, out.shape[1] - 1)
    return out[sequence, step].masked_fill((tokens >= query_starts[-1])[:, None, None], 0.0)


def fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return (T, H, V)."""
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def check_arguments(
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
    window: int = 0,
    chunked: bool = False,
    causal: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **_: Any,
) -> None:
    """Raise `RuntimeError` unless ranks, heads, index dtypes, chunks and scales are as `reference` says."""
    op = "attention"
    check_ranks(op, 3, query=query, key=key, value=value)
    check_ranks(op, 4, key_cache=key_cache, value_cache=value_cache)
    check_ranks(op, 2, block_table=block_table)
    heads, kv_heads = query.shape[1], key.shape[1]
    check(heads % kv_heads == 0, op, f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    fits = key_cache.shape[2:] == key.shape[1:] and value_cache.shape[2:] == value.shape[1:]
    check(fits, op, "cache and key/value differ in heads or head size")
    for name, index, dtype in (("slot_mapping", slot_mapping, torch.int64), ("block_table", block_table, torch.int32)):
        check(index.dtype == dtype, op, f"{name} must be {dtype}")
    for name, index in (("seq_lens", seq_lens), ("query_starts", query_starts)):
        whole = index.dtype in (torch.int32, torch.int64)
        check(whole, op, f"{name} must be torch.int32 or torch.int64")
    if chunked:
        check(window > 0 and causal, op, f"chunks are causal and of a window's size, not {window=} and {causal=}")
    check_scales(op, key_cache, value_cache, k_scale, v_scale)


ATTENTION = declare(
    CanonicalOp(
        schema="attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor block_table, Tensor slot_mapping, Tensor seq_lens, Tensor query_starts, *, float scale, int window=0, "
        "bool chunked=False, float softcap=0.0, Tensor? sinks=None, Tensor? mask=None, bool causal=True, "
        "int max_query_len=0, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
        reference=reference,
        fake=fake,
        check=check_arguments,
        calls=calls,
        break_point=True,
        eager=partial(by_sequence, reference),
        indices=step_indices,
    )
)
