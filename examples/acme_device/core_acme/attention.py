"""Acme's attention kernel: `core::attention` over chunks of the paged cache, their softmaxes merged at the end.

Shapes as in `core.common.ops.attention.paged`: T tokens, H query heads in K groups of G, D and V head sizes, M blocks
of a sequence. B groups of Q queries: sequences, or single tokens. S: the positions of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from core.common.ops.attention.paged import check_arguments, fake, write_cache
from core.common.ops.attention.scores import soft_capped
from core.errors import UsageError
from torch import Tensor

CHUNK = 16384
"""Positions attended over at a time, of all groups together: what the simulated device's on-chip memory holds."""

_MAX_WASTE = 4  # times the tokens: how many rows their sequences may be padded to; beyond, each token is a group
_LOWEST = torch.finfo(torch.float32).min


class _Groups(NamedTuple):
    """Queries that share a sequence, Q in each of B groups."""

    #: (B, Q), indices of tokens.
    rows: Tensor
    #: (B, Q), places in the sequence.
    positions: Tensor
    #: (B, M), of the group's sequence.
    blocks: Tensor
    #: (B,), of the group's sequence.
    lens: Tensor


class _Part(NamedTuple):
    """A softmax over some positions, both sides of the quotient divided by `exp(top)`."""

    #: (B, K, G, Q, V), the sum of weighted values.
    out: Tensor
    #: (B, K, G, Q, 1), the sum of weights.
    total: Tensor
    #: (B, K, G, Q, 1), the largest score.
    top: Tensor


class Options(NamedTuple):
    """The arguments of the op that say how to attend; `core.common.ops.attention.paged` says what they mean."""

    sinks: Tensor | None
    scale: float
    window: int
    chunked: bool
    softcap: float
    causal: bool
    max_query_len: int


def attention(
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
    """Be `core::attention` by one kernel of Acme; raises `UsageError` for what the kernel cannot do: masks, codes."""
    for name, given in (("mask", mask), ("k_scale", k_scale), ("v_scale", v_scale)):
        if given is not None:
            raise UsageError(
                f"acme::attention with a {name}",
                found=f"a {name} of shape {tuple(given.shape)}, and the kernel takes none",
                remedy="ask the implementation's condition first",
            )
    paged = (key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts)
    return PAGED_ATTENTION(query, key, value, *paged, sinks, scale, window, chunked, softcap, causal, max_query_len)  # type: ignore[no-any-return]


@torch.library.custom_op("acme::paged_attention", mutates_args=("key_cache", "value_cache"))
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    chunked: bool,
    softcap: float,
    causal: bool,
    max_query_len: int,
) -> Tensor:
    """Write key and value into the cache, then attend; no value of a tensor is read on the host."""
    check_arguments(query, key, value, key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts)
    write_cache(key, value, key_cache, value_cache, slot_mapping)
    caches = (key_cache, value_cache, block_table)
    options = Options(sinks, scale, window, chunked, softcap, causal, max_query_len)
    return attend(query, caches, seq_lens, query_starts, options)


@paged_attention.register_fake
def _paged_attention_fake(query: Tensor, *arguments: Any) -> Tensor:
    return fake(query, *arguments[:8])


PAGED_ATTENTION = torch.ops.acme.paged_attention.default


def attend(
    query: Tensor, caches: tuple[Tensor, Tensor, Tensor], seq_lens: Tensor, query_starts: Tensor, options: Options
) -> Tensor:
    """Attend over caches (keys, values, block table); returns (T, H, V) in the query's dtype, zero in padding rows."""
    num_tokens, num_kv_heads = query.shape[0], caches[0].shape[2]
    tokens = torch.arange(num_tokens, dtype=query_starts.dtype, device=query.device)
    # Padding rows are past the end; they take the last sequence's place until they are zeroed.
    sequence = torch.searchsorted(query_starts[1:], tokens, right=True).clamp_(max=seq_lens.shape[0] - 1)
    num_steps = options.max_query_len or num_tokens
    if seq_lens.shape[0] * num_steps <= _MAX_WASTE * num_tokens:
        steps = tokens[:num_steps]
        rows, lens, blocks = query_starts[:-1, None] + steps, seq_lens, caches[2]
        positions = (seq_lens - query_starts.diff())[:, None] + steps
        own = (sequence, (tokens - query_starts[sequence]).clamp_(0, max(len(steps) - 1, 0)))
    else:
        rows, lens, blocks = tokens[:, None], seq_lens[sequence], caches[2][sequence]
        positions = (tokens + lens - query_starts[1:][sequence])[:, None]
        own = (tokens, torch.zeros_like(tokens))
    groups = _Groups(rows.clamp(max=num_tokens - 1), positions, blocks.long(), lens)
    out, total = _merged(list(_parts(query.unflatten(1, (num_kv_heads, -1)), caches[:2], groups, options)))
    out = (out / total.masked_fill_(total == 0, 1.0)).permute(0, 3, 1, 2, 4)[own].flatten(1, 2)  # (T, H, V)
    return out.masked_fill_((tokens >= query_starts[-1])[:, None, None], 0.0).to(query.dtype)


def _parts(query: Tensor, caches: tuple[Tensor, ...], groups: _Groups, options: Options) -> Iterator[_Part]:
    """Yield the softmax over each chunk of positions by itself, for query (T, K, G, D)."""
    # The scale goes to the query, which is smaller than the scores.
    padded = (query[groups.rows].float() * options.scale).permute(0, 2, 3, 1, 4)
    shape, queries, page = padded.shape[2:4], padded.flatten(2, 3), caches[0].shape[1]
    blocks_each = max(CHUNK // (page * max(padded.shape[0], 1)), 1)
    for first in range(0, max(groups.blocks.shape[1], 1), blocks_each):
        blocks = groups.blocks[:, first : first + blocks_each]
        keys, values = (cache[blocks].flatten(1, 2).float() for cache in caches)  # (B, S, K, D or V)
        unseen = _unseen(groups, first * page, keys.shape[1], options)  # (B, Q, S)
        scores = soft_capped(queries @ keys.permute(0, 2, 3, 1), options.softcap).unflatten(2, shape)
        scores = scores.masked_fill_(unseen[:, None, None], -math.inf)  # (B, K, G, Q, S)
        # The lowest number instead of -inf, of a token that sees nothing here: -inf - -inf is NaN.
        top = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
        weights = scores.sub_(top).exp_()
        # Memory that nobody wrote may hold NaN, and 0 * NaN is NaN.
        values = values.masked_fill_(unseen.all(1)[:, :, None, None], 0.0).transpose(1, 2)
        out = (weights.flatten(2, 3) @ values).unflatten(2, shape)
        yield _Part(out, weights.sum(-1, keepdim=True), top)
    if options.sinks is not None:
        # A logit without a value.
        top = options.sinks.float().view(1, query.shape[1], -1, 1, 1).expand(*padded.shape[:-1], 1)
        yield _Part(torch.zeros_like(top), torch.ones_like(top), top)


def _merged(parts: list[_Part]) -> tuple[Tensor, Tensor]:
    """Return values and denominator of the parts together, each corrected by the maximum of all."""
    if len(parts) == 1:
        return parts[0].out, parts[0].total
    top = torch.stack([part.top for part in parts]).amax(0)
    out, total = torch.zeros_like(top), torch.zeros_like(top)
    for part in parts:
        share = torch.exp(part.top - top)
        out, total = out + part.out * share, total + part.total * share
    return out, total


def _unseen(groups: _Groups, first: int, num_keys: int, options: Options) -> Tensor:
    """Return (B, Q, S): which positions of the chunk that begins at `first` a query does not see."""
    keys = torch.arange(first, first + num_keys, dtype=groups.lens.dtype, device=groups.lens.device)
    positions = groups.positions[..., None]
    unseen = (keys >= groups.lens[:, None])[:, None].expand(-1, positions.shape[1], -1)
    if options.causal:
        unseen = unseen | (keys > positions)
    if options.window:
        before = positions % options.window if options.chunked else options.window - 1  # its own position that it sees
        unseen = unseen | (keys < positions - before)
    return unseen
