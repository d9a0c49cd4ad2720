"""ATB's kernels of latent attention (DeepSeek): over pages, merged block by block, and the one that prepares inputs.

T tokens, N query heads, R latent features (512), P rotary ones (64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import CODE_MAX, HALF, demand
from simulator.kernels.atb.attention import attend, causal, lengths_of, paged, rms_normed
from simulator.marshal import kernel

LATENT, ROTARY, NOPE, DOWN = 512, 64, 128, 1536
"""Features: of the latent, of what rotates, of a query head that does not, of the query's own latent."""
RING = 2
SPLIT_CACHE = 1
BY_TOKEN = 1


@kernel("AtbMLA", "TTTTTTTTTTIFIiiiTT")
def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    table: Tensor,
    lengths: Tensor,
    mask: Tensor | None,
    queries: Tensor | None,
    qk_scales: Tensor | None,
    pv_scales: Tensor | None,
    heads: int,
    scale: float,
    kv_heads: int,
    mask_type: int,
    calc_type: int,
    cache_mode: int,
    out: Tensor,
    log_sum: Tensor | None,
) -> None:
    """One query (N, R + P) a sequence; keys are latent and rotary features of a page, values the latent."""
    given = (mask, queries, qk_scales, pv_scales)
    demand(all(each is None for each in given) and mask_type == 0 and cache_mode == SPLIT_CACHE, "not simulated")
    demand(q_nope.dtype in HALF and q_nope.shape[1:] == (heads, LATENT), f"queries {tuple(q_nope.shape)}")
    demand(latent.shape[1:] == (latent.shape[1], kv_heads, LATENT) and kv_heads == 1, f"latent {tuple(latent.shape)}")
    demand(calc_type in (0, RING) and (calc_type == RING or log_sum is None), f"calculation {calc_type}")
    for index, length in enumerate(lengths_of(lengths)):
        row = table[index]
        values, rotary = (paged(cache, row, length, 1) for cache in (latent, k_rope))
        query = torch.cat((q_nope[index : index + 1], q_rope[index : index + 1]), dim=-1)
        result, total = attend(query, torch.cat((values, rotary), dim=-1), values, scale)
        out[index] = result[0].to(out.dtype)
        if log_sum is not None:
            log_sum[index] = total.to(log_sum.dtype)


@kernel("AtbRingMLA", "TTTTTTTTTIIFiiiiTT")
def ring_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    value: Tensor,
    mask: Tensor,
    lengths: Tensor,
    pre_out: Tensor | None,
    pre_log_sum: Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    kernel_type: int,
    mask_type: int,
    layout: int,
    calc_type: int,
    out: Tensor,
    log_sum: Tensor,
) -> None:
    """Packed sequences; calc_type 0 merges the result with that of the blocks before, 1 begins."""
    demand(layout == 0 and (calc_type == 1 or (pre_out is not None and pre_log_sum is not None)), "not simulated")
    by_side = lengths_of(lengths) if lengths.dim() == 1 else []
    sides = (by_side, by_side) if by_side else tuple(lengths_of(each) for each in lengths)
    query, key = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
    demand(query.shape[1] == heads and key.shape[1] == kv_heads == value.shape[1], f"{heads} and {kv_heads} heads")
    start = first = 0
    for queries, keys in zip(*sides, strict=True):
        rows, columns = slice(start, start + queries), slice(first, first + keys)
        demand(0 < queries <= keys and (not mask_type or queries == keys), f"{queries} queries and {keys} keys")
        bias = causal(queries, keys) if mask_type else None
        result, total = attend(query[rows], key[columns], value[columns], scale, bias)
        if calc_type == 0:
            assert pre_out is not None and pre_log_sum is not None
            before = pre_log_sum[:, rows].float()
            both = torch.logaddexp(before, total)
            kept, new = (torch.exp(each - both).t().unsqueeze(-1) for each in (before, total))
            result, total = pre_out[rows].float() * kept + result * new, both
        out[rows] = result.to(out.dtype)
        log_sum[:, rows] = total
        start, first = start + queries, first + keys


def _product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows, turned into codes by their largest value, with codes (N, K); scales: one for each column."""
    largest = x.abs().amax(-1, keepdim=True) / CODE_MAX
    codes = (x / largest).round()
    return (codes.double() @ weight.double().t()).float() * scales.float() * largest


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()


@kernel("AtbMLAPreprocess", "T" * 24 + "iiiFiibbbii" + "TTTT")
def preprocess(*arguments: object) -> None:
    """Norm, codes by token, product; of one part norm, codes, product, of the other norm and rotation into pages."""
    x, gamma0, beta0, _scale0, _offset0, down, scales0, _bias0, gamma1, beta1, _scale1, _offset1 = arguments[:12]
    up, scales1, _bias1, gamma2, cos, sin, absorb, _cache, _rope_cache, slots, *_ = arguments[12:24]
    epsilon, cache_mode, quant_mode = arguments[27], *arguments[33:35]
    q_latent, cache, q_rotary, rope_cache = arguments[35:]
    tensors = (x, gamma0, beta0, down, scales0, gamma1, beta1, up, scales1, gamma2, cos, sin, absorb, slots)
    assert all(isinstance(each, Tensor) for each in (*tensors, q_latent, cache, q_rotary, rope_cache))
    demand(cache_mode == SPLIT_CACHE and quant_mode == BY_TOKEN, f"caches {cache_mode}, codes {quant_mode}")
    demand(scales0.dtype == scales1.dtype == torch.float32, f"scales of {scales0.dtype}")  # type: ignore[attr-defined]
    _preprocess(*tensors, epsilon=epsilon, out=(q_latent, cache, q_rotary, rope_cache))  # type: ignore[arg-type]


def _preprocess(
    x: Tensor,
    gamma0: Tensor,
    beta0: Tensor,
    down: Tensor,
    scales0: Tensor,
    gamma1: Tensor,
    beta1: Tensor,
    up: Tensor,
    scales1: Tensor,
    gamma2: Tensor,
    cos: Tensor,
    sin: Tensor,
    absorb: Tensor,
    slots: Tensor,
    *,
    epsilon: float,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """down (R + P + 1536, hidden), up (N * (128 + P), 1536): codes; absorb (N, 128, R)."""
    dtype, heads = x.dtype, absorb.shape[0]
    demand(tuple(down.shape) == (LATENT + ROTARY + DOWN, x.shape[1]), f"a weight {tuple(down.shape)}")
    first = _product(rms_normed(x, gamma0, epsilon) + beta0.float(), down, scales0).to(dtype).float()
    latent, rotary, query = first.split((LATENT, ROTARY, DOWN), dim=-1)
    second = _product(rms_normed(query, gamma1, epsilon) + beta1.float(), up, scales1).to(dtype).float()
    nope, turning = second.view(-1, heads, NOPE + ROTARY).split((NOPE, ROTARY), dim=-1)
    q_latent, cache, q_rotary, rope_cache = out
    q_latent.copy_(torch.einsum("tnd,ndr->tnr", nope, absorb.float()))
    q_rotary.copy_(_rotated(turning, cos[:, None], sin[:, None]))
    page, at = cache.shape[1], slots.long()
    cache[at // page, at % page, 0] = rms_normed(latent, gamma2, epsilon).to(cache.dtype)
    rope_cache[at // page, at % page, 0] = _rotated(rotary, cos, sin).to(rope_cache.dtype)
