"""ATB's kernels that work row by row (codes, rotation, routing, a product added to a sum), and its paged caches."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from simulator import atb
from simulator.bounds import CODE_MAX, INT8, demand
from simulator.kernels.atb.attention import lengths_of, rms_normed
from simulator.kernels.moe.experts import largest
from simulator.marshal import kernel

PLAIN_NORM, CODES = 1, 17
SIGMOID = 8


def _coded(values: Tensor, scale: Tensor, offset: Tensor | None, out: Tensor) -> None:
    """Divide by scales, round, and add zero points."""
    codes = (values / scale.float()).round()
    if offset is not None and offset.numel():
        codes = codes + offset.float()
    out.copy_(codes.clamp(-CODE_MAX - 1, CODE_MAX))


@kernel("AtbElewise", "PLL")
def elementwise(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Turn numbers into codes, by one scale or by one scale for each place of the last axis."""
    demand(atb.read(atb.Elewise, given).kind == CODES, "not simulated")
    x, scale, offset = tensors
    demand(scale.dtype == x.dtype and offset.dtype == torch.int8, f"scales of {scale.dtype}")
    _coded(x.float(), scale, offset, outs[0])


@kernel("AtbRmsNorm", "PLL")
def rms_norm_codes(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Norm rows, and make codes of them: divide by the one scale, and add the one zero point."""
    param = atb.read(atb.RmsNorm, given)
    demand(param.kind == PLAIN_NORM and param.quant_type == INT8, "not simulated")
    x, gamma, beta, scale, offset = tensors
    demand(scale.numel() == 1 and offset.numel() == 1 and offset.dtype == torch.int8, "one scale, one int8 offset")
    _coded(rms_normed(x, gamma, param.epsilon) + beta.float(), scale, offset, outs[0])


@kernel("AtbLinear", "PLL")
def linear(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Add x^T w to the fp32 sum in the result's memory."""
    param = atb.read(atb.Linear, given)
    demand(param.transpose_a and not param.transpose_b and param.accumulate and not param.bias, "not simulated")
    x, weight, before = tensors
    demand(outs[0].dtype == torch.float32 and before.data_ptr() == outs[0].data_ptr(), "a sum of fp32 in place")
    outs[0].add_(x.float().t() @ weight.float())


@kernel("AtbRope", "PLL")
def rope(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Rotate query and key (T, heads * D) by halves or by neighbours; tables (T, D)."""
    coefficient = atb.read(atb.Rope, given).coefficient
    query, key, cos, sin, lengths = tensors
    size = cos.shape[-1]
    demand(coefficient in (2, size), f"coefficient {coefficient} with heads of {size}")
    demand(sum(lengths_of(lengths)) == query.shape[0] == cos.shape[0], f"{query.shape[0]} tokens")
    for rows, out in zip((query, key), outs, strict=True):
        x = rows.float().view(rows.shape[0], -1, size)
        if coefficient == 2:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        out.copy_((x * cos.float()[:, None] + turned * sin.float()[:, None]).view(rows.shape))


def _best_groups(scores: Tensor, groups: int, k: int, best: int) -> Tensor:
    """Return scores with zeros outside the k best groups.

    The value of a group is the sum of its highest scores, `best` of them.
    """
    demand(scores.shape[1] % groups == 0 and k <= groups and best <= scores.shape[1] // groups, f"{groups} groups")
    parts = scores.view(scores.shape[0], groups, -1)
    value = parts.sort(dim=-1, descending=True).values[..., :best].sum(-1)
    hidden = torch.ones(value.shape, dtype=torch.bool).scatter(1, largest(value, k), False)
    return parts.masked_fill(hidden.unsqueeze(-1), 0).reshape(scores.shape)


@kernel("AtbGroupTopk", "PLL")
def group_topk(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Put zeros in place of all but the k best groups."""
    param = atb.read(atb.GroupTopk, given)
    best = param.best if param.several else 1
    outs[0].copy_(_best_groups(tensors[0].float(), param.groups, param.k, best))


@kernel("AtbFusedAddTopkDiv", "TTTTIIIIibFbTT")
def add_topk_div(
    x: Tensor,
    bias: Tensor,
    mapping_num: Tensor | None,
    mapping: Tensor | None,
    groups: int,
    group_topk: int,
    best: int,
    k: int,
    activation: int,
    is_norm: bool,
    scale: float,
    maps: bool,
    y: Tensor,
    indices: Tensor,
) -> None:
    """Choose experts of the best groups by sigmoid plus bias, and weigh them by their sigmoids alone.

    is_norm: divide the weights by their sum, and multiply by scale.
    """
    demand(activation == SIGMOID and not maps and mapping is None and mapping_num is None, "not simulated")
    demand(x.dtype == bias.dtype and bias.shape == x.shape[1:], f"a bias {tuple(bias.shape)} of {bias.dtype}")
    own = torch.sigmoid(x.float())
    chosen = largest(_best_groups(own + bias.float(), groups, group_topk, best), k)
    weights = own.gather(1, chosen)
    y.copy_(weights / weights.sum(-1, keepdim=True) * scale if is_norm else weights)
    indices.copy_(chosen)


def stored(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write rows (T, heads, D) into pages (blocks, page, heads, D); a row with a negative slot is left out."""
    kept = slots >= 0
    at = slots[kept].long()
    demand(bool((at < cache.shape[0] * cache.shape[1]).all()), "slots beyond the cache")
    cache[at // cache.shape[1], at % cache.shape[1]] = rows[kept]


@kernel("AtbReshapeAndCache", "PLL")
def reshape_and_cache(given: bytes, tensors: list[Tensor], outs: list[Tensor]) -> None:
    """Write keys and values, or keys alone, at their slots."""
    demand(atb.read(atb.ReshapeAndCache, given).kind in (0, 1), "not simulated")
    slots = tensors[-1]
    demand(slots.dtype == torch.int32, f"slots of {slots.dtype}")
    for rows, cache in zip(tensors[: len(outs)], outs, strict=True):
        stored(rows, cache, slots)


def load_pages(
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    is_sum: bool,
    outs: tuple[Tensor, Tensor],
) -> None:
    """Copy keys and values of sequences out of pages.

    - lengths: (B,); where is_sum, their running sums (B + 1,).
    - starts: (B,), how many tokens of each sequence to skip, a multiple of the page size.
    """
    counts = lengths_of(lengths)
    ends = counts if is_sum else [sum(counts[:index]) for index in range(len(counts) + 1)]
    spans = list(itertools.pairwise(ends))
    for cache, out in zip(caches, outs, strict=True):
        page = cache.shape[1]
        firsts = [0] * len(spans) if starts is None else [each // page for each in lengths_of(starts)]
        for row, (start, end), first in zip(table, spans, firsts, strict=True):
            blocks = row[first : first + -(-(end - start) // page)].long()
            out[start:end] = cache[blocks].reshape(-1, *cache.shape[2:])[: end - start]


@kernel("AtbPagedCacheLoad", "TTTTTTThbb")
def paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    kind: int,
    is_sum: bool,
    has_starts: bool,
) -> None:
    """Copy keys and values of sequences out of pages, as `load_pages` says."""
    demand(kind == 1 and has_starts is (starts is not None), f"caches of kind {kind}")
    load_pages((key_cache, value_cache), table, lengths, starts, is_sum, (key, value))
