"""ATB's attention: of packed sequences, of pages, and of a prefix in pages, written out in fp32.

T tokens of all sequences, N query heads, G heads of keys and values, D and V their sizes, B sequences, L keys of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator import atb
from simulator.bounds import CODE_MAX, HALF, demand
from simulator.marshal import kernel

ONLINE = 3
"""Codes of query, keys and values, and probabilities turned into codes on the way."""
ONE_BLOCK = 128


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return (S, N, V) of one sequence and log-sums (N, S). query (S, N, D); keys, values (L, G, ·); bias is added."""
    group = query.shape[1] // keys.shape[1]
    q = query.float().transpose(0, 1)
    k, v = (each.float().transpose(0, 1).repeat_interleave(group, 0) for each in (keys, values))
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    log_sum = scores.logsumexp(-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1), log_sum


def causal(queries: int, keys: int) -> Tensor:
    """Return what is added to scores (queries, keys) whose last query stands at the last key."""
    late = torch.arange(keys)[None] > torch.arange(queries)[:, None] + keys - queries
    return torch.zeros(queries, keys).masked_fill(late, -torch.inf)


def added(mask: Tensor) -> Tensor:
    """Return a mask as it is added to scores: of fp16 as it is; of bf16 ones, which hide."""
    if mask.dtype == torch.float16 or bool((mask.float() < 0).any()):
        return mask.float()
    demand(bool(((mask == 0) | (mask == 1)).all()), "a mask of bf16 has zeros and ones, or what is added")
    return torch.zeros(mask.shape).masked_fill(mask == 1, -torch.inf)


def check_triangle(mask: Tensor | None, size: int) -> None:
    """Demand the mask of fixed size that stands for the triangle above the diagonal."""
    demand(mask is not None and tuple(mask.shape) == (size, size), f"a mask of {size} by {size}")
    assert mask is not None
    upper = torch.ones(size, size, dtype=torch.bool).triu(1)
    demand(torch.equal(mask != 0, upper), "a mask above the diagonal")


def rms_normed(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Return rows over the root of their mean square, times gamma, in fp32."""
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gamma.float()


def lengths_of(lengths: Tensor) -> list[int]:
    """Return lengths, which ATB takes as int32, as a list."""
    demand(lengths.dtype == torch.int32, f"lengths of {lengths.dtype}")
    return [int(each) for each in lengths.reshape(-1)]


def paged(cache: Tensor, row: Tensor, length: int, heads: int) -> Tensor:
    """Gather the first positions of a sequence (length, heads, D) from pages (blocks, page, heads, D or heads * D)."""
    page = cache.shape[1]
    blocks = row[: -(-length // page)].long()
    demand(not blocks.numel() or int(blocks.max()) < cache.shape[0], f"pages {blocks.tolist()} of {cache.shape[0]}")
    return cache[blocks].reshape(blocks.numel() * page, heads, -1)[:length]


def prefixed(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    num_queries: Tensor,
    num_keys: Tensor,
    heads: tuple[int, int],
    scale: float,
    out: Tensor,
) -> None:
    """Attend over pages with several queries a sequence, causal; what stands before the queries fills whole pages."""
    lengths = list(zip(lengths_of(num_queries), lengths_of(num_keys), strict=True))
    demand(all((keys - queries) % 128 == 0 for queries, keys in lengths), f"prefixes of {lengths}")
    rows, results = (each.view(each.shape[0], heads[0], -1) for each in (query, out))
    start = 0
    for index, (queries, keys) in enumerate(lengths):
        demand(0 < queries <= keys, f"{queries} queries and {keys} keys")
        k, v = (paged(cache, table[index], keys, heads[1]) for cache in caches)
        part = slice(start, start + queries)
        results[part] = attend(rows[part], k, v, scale, causal(queries, keys))[0].to(out.dtype)
        start += queries


@kernel("AtbSelfAttention", "PLL")
def self_attention(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Packed sequences, each with a mask of its own or none; or a prefix in pages and a triangle."""
    param = atb.read(atb.SelfAttention, given)
    heads = (param.heads, param.kv_heads or param.heads)
    demand(tensors[0].dtype in HALF and not param.quant_type and not param.clamp_type, f"query {tensors[0].dtype}")
    if param.calc_type == atb.PREFIX_ENCODER:
        demand(param.mask_type == atb.COMPRESSED_SELF, f"mask {param.mask_type} of a prefix is not simulated")
        query, keys, values, table, triangle, queries, lengths = tensors
        check_triangle(triangle, 128)
        demand(keys.shape[1] == 128, f"pages of {keys.shape[1]}")
        prefixed(query, (keys, values), table, queries, lengths, heads, param.scale, outs[0])
        return
    demand(param.calc_type == atb.PA_ENCODER, f"calculation {param.calc_type} is not simulated")
    demand(param.mask_type <= atb.COMPRESSED_SELF, f"mask {param.mask_type} is not simulated")
    (query, key, value), rest = tensors[:3], tensors[3:]
    mask = rest.pop(0) if param.mask_type else None
    if param.mask_type == atb.COMPRESSED_SELF:
        check_triangle(mask, 2048)
    out, start = outs[0].view(query.shape[0], heads[0], -1), 0
    for index, length in enumerate(lengths_of(rest[0])):
        part = slice(start, start + length)
        q = query[part].view(length, heads[0], -1)
        k, v = (each[part].view(length, heads[1], -1) for each in (key, value))
        if param.mask_type == atb.COMPRESSED_SELF:
            bias: Tensor | None = causal(length, length)
        else:
            bias = None if mask is None else _of_batch(mask, index, param.mask_type)[..., :length, :length]
        out[part] = attend(q, k, v, param.scale, bias)[0].to(out.dtype)
        start += length
    demand(start == query.shape[0], f"{query.shape[0]} tokens, and lengths of {start}")


def _of_batch(mask: Tensor, index: int, mask_type: int) -> Tensor:
    """Return a sequence's mask: (S, S) or (B, S, S); of slopes (N, S, S) or (B, N, S, S)."""
    wide = added(mask)
    by_batch = wide.dim() == (4 if mask_type == atb.ALIBI else 3)
    return wide[index if wide.shape[0] > 1 else 0] if by_batch else wide


@kernel("AtbPagedAttention", "PLL")
def paged_attention(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """One query a sequence; or several, with a row of the mask each, or causal."""
    param = atb.read(atb.PagedAttention, given)
    heads = (param.heads, param.kv_heads or param.heads)
    query, keys = tensors[:2]
    values = keys[..., : param.latent] if param.latent else tensors[2]
    table, lengths, *rest = tensors[2 if param.latent else 3 :]
    demand(param.quant_type == 0 or keys.dtype == torch.int8, f"codes of {keys.dtype}")
    counts = lengths_of(lengths)
    queries = lengths_of(rest[1]) if param.calc_type else [1] * len(counts)
    demand(sum(queries) == query.shape[0] and len(counts) == table.shape[0], f"{query.shape[0]} tokens, {queries}")
    if param.mask_type == atb.COMPRESSED_PAGED:
        check_triangle(rest[0], 2048)
        keys, values = (_plain(cache, heads[1]) for cache in (keys, values))
    start = 0
    for index, (wanted, length) in enumerate(zip(queries, counts, strict=True)):
        part = slice(start, start + wanted)
        k, v = (paged(cache, table[index], length, heads[1]) for cache in (keys, values))
        q, scale = query[part].view(wanted, heads[0], -1), param.scale
        bias: Tensor | None = None
        if param.mask_type == atb.COMPRESSED_PAGED:
            bias = causal(wanted, length)
        elif param.mask_type == atb.SPEC:
            bias = added(rest[0])[part, :length]
        elif param.mask_type == atb.ALIBI:
            wide = added(rest[0])
            bias = (wide[index] if wide.dim() == 4 else wide)[..., :length]
        if param.quant_type:
            demand(param.quant_type == ONLINE and bias is None, f"quantisation {param.quant_type} is not simulated")
            attended = _attend_codes(q, k, v, scale, rest[-2:])
        else:
            attended = attend(q, k, v, scale, bias)[0]
        outs[0].view(query.shape[0], heads[0], -1)[part] = attended.to(outs[0].dtype)
        start += wanted


def _attend_codes(query: Tensor, keys: Tensor, values: Tensor, scale: float, scales: Sequence[Tensor]) -> Tensor:
    """Attend with codes of int8; scales: of products with keys and with values, one each (N,)."""
    demand(query.dtype == torch.int8, f"a query of {query.dtype}")
    demand(all(each.dtype == torch.float32 and each.shape == query.shape[1:2] for each in scales), "a scale a head")
    demand(keys.shape[0] <= ONE_BLOCK, f"{keys.shape[0]} keys of codes are not simulated")
    group = query.shape[1] // keys.shape[1]
    q = query.float().transpose(0, 1)
    k, v = (each.float().transpose(0, 1).repeat_interleave(group, 0) for each in (keys, values))
    by_key, by_value = (each.view(-1, 1, 1) for each in scales)
    scores = q @ k.transpose(-1, -2) * by_key * scale
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    codes = (powers * CODE_MAX).half().float().round()
    return ((codes @ v) * by_value / CODE_MAX / powers.sum(-1, keepdim=True)).transpose(0, 1)


def _plain(cache: Tensor, heads: int) -> Tensor:
    """Return pages (blocks, page, heads, D) of (blocks, heads * D / 16, page, 16)."""
    demand(cache.dim() == 4 and cache.shape[3] == 16, f"pages {tuple(cache.shape)}")
    return cache.permute(0, 2, 1, 3).reshape(cache.shape[0], cache.shape[2], heads, -1)


@kernel("AtbSelfAttentionPrefixEncoder", "TTTTTTTTiIIFT")
def prefix_encoder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    mask: Tensor | None,
    queries: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    mask_type: int,
    heads: int,
    kv_heads: int,
    scale: float,
    out: Tensor,
) -> None:
    """The same over a prefix in pages, with no mask given."""
    demand(mask_type == 9 and mask is None and slopes is None, f"mask {mask_type} is not simulated")
    prefixed(query, (key, value), table, queries, lengths, (heads, kv_heads), scale, out)
