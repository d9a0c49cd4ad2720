"""Mixture of experts: routing, sorting of rows, grouped products and the weighted sum, each written out in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simulator.bounds import HALF, demand
from simulator.marshal import kernel

FLOATS = (*HALF, torch.float32)


def _softmax(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return powers / powers.sum(dim=-1, keepdim=True)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the places (T, k) of the largest scores of each row, largest first, the lower place of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@kernel("aclnnMoeGatingTopKSoftmaxV2", "TTIIbTTT")
def gating_softmax(
    x: Tensor, finished: Tensor | None, k: int, renorm: int, wants_all: bool, y: Tensor, indices: Tensor, scores: Tensor
) -> None:
    """renorm 0: softmax, then the k largest; 1: the k largest, then their softmax."""
    demand(x.dtype in FLOATS and y.dtype == x.dtype and 0 < k <= x.shape[-1], f"x {x.dtype}, {k} of {x.shape[-1]}")
    demand(finished is None and not wants_all and x.dim() == 2, "not simulated")
    wide = x.to(torch.float32)
    chosen = largest(wide, k)
    values = wide.gather(1, chosen)
    y.copy_(_softmax(values) if renorm else _softmax(wide).gather(1, chosen))
    indices.copy_(chosen)


@kernel("aclnnMoeGatingTopK", "TTIIIIIIbDDTTT")
def gating(
    x: Tensor,
    bias: Tensor | None,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    wants_all: bool,
    factor: float,
    eps: float,
    y: Tensor,
    indices: Tensor,
    scores: Tensor,
) -> None:
    """Choose the best experts of the best groups by score plus bias; weigh them by score, sigmoids over their sum."""
    experts = x.shape[1]
    demand(bias is None or bias.dtype == x.dtype, "a bias of another dtype")
    demand(renorm == 0 and not wants_all and x.dtype in FLOATS and experts <= 2048, "not simulated")
    size = experts // group_count
    demand(
        experts % group_count == 0 and size > 2 and -(-size // 32) * 32 * group_count <= 2048, f"{group_count} groups"
    )
    demand(1 <= k_group <= group_count and k <= k_group * size, f"{k} of {k_group} groups")
    wide = x.to(torch.float32)
    own = 1.0 / (1.0 + torch.exp(-wide)) if norm_type == 1 else _softmax(wide)
    ranking = own if bias is None else own + bias.to(torch.float32)
    if group_count > 1:
        by_group = ranking.view(-1, group_count, size)
        best = by_group.sort(dim=-1, descending=True).values
        group_score = best[..., 0] if group_select_mode == 0 else best[..., 0] + best[..., 1]
        hidden = torch.ones(group_score.shape, dtype=torch.bool).scatter(1, largest(group_score, k_group), False)
        ranking = by_group.masked_fill(hidden.unsqueeze(-1), -torch.inf).view(-1, experts)
    chosen = largest(ranking, k)
    weights = own.gather(1, chosen)
    if norm_type == 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    y.copy_(weights * factor)
    indices.copy_(chosen)


@kernel("aclnnMoeInitRoutingV3", "TTTTIIIIIbIAITTTT")
def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    tokens_num_type: int,
    tokens_num_flag: bool,
    quant_mode: int,
    active_range: list[int],
    row_idx_type: int,
    expanded_x: Tensor,
    expanded_row_idx: Tensor,
    tokens: Tensor,
    expanded_scale: Tensor,
) -> None:
    """Sort copies of the rows by expert. row_idx_type 0: where each source row went; tokens: counts, or their sums."""
    flat = expert_idx.reshape(-1).to(torch.int64)
    demand(expert_idx.dtype == torch.int32, f"experts as {expert_idx.dtype}")
    demand(
        active_range == [0, expert_num] and int(flat.min()) >= 0 and int(flat.max()) < expert_num, "an expert beyond"
    )
    demand(active_num in (-1, 0, flat.numel()) and drop_pad_mode == 0 and quant_mode == -1, "not simulated")
    demand(scale is None and offset is None and tokens_num_flag and tokens_num_type in (0, 1), "not simulated")
    order = flat.sort(stable=True).indices
    expanded_x.copy_(x[order // expert_idx.shape[1]])
    if row_idx_type:
        expanded_row_idx.copy_(order)
    else:
        expanded_row_idx[order] = torch.arange(flat.numel(), dtype=torch.int32)
    counts = torch.bincount(flat, minlength=expert_num)
    tokens.copy_(counts if tokens_num_type == 1 else counts.cumsum(0))


def _grouped(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    offset: list[Tensor] | None,
    antiquant_scale: list[Tensor] | None,
    antiquant_offset: list[Tensor] | None,
    per_token: list[Tensor] | None,
    group_list: Tensor,
    activation_input: list[Tensor] | None,
    activation_scale: list[Tensor] | None,
    activation_offset: list[Tensor] | None,
    split_item: int,
    group_type: int,
    group_list_type: int,
    act_type: int,
    out: list[Tensor],
) -> None:
    """Multiply rows of one tensor, group by group, by matrices of one tensor."""
    codes = (scale, offset, antiquant_scale, antiquant_offset, per_token)
    activation = (activation_input, activation_scale, activation_offset)
    demand(not any((bias, *codes, *activation)) and act_type == 0, "not simulated")
    demand(len(x) == len(weight) == len(out) == 1 and split_item in (2, 3) and group_type == 0, "not simulated")
    (rows,), (matrices,), (result,) = x, weight, out
    demand(rows.dtype == matrices.dtype == result.dtype and rows.dtype in FLOATS, f"rows of {rows.dtype}")
    demand(rows.is_contiguous() and matrices.dim() == 3 and rows.shape[1] == matrices.shape[1], "shapes")
    demand(group_list.dtype == torch.int64 and group_list.shape[0] == matrices.shape[0] <= 1024, "groups")
    demand(group_list_type in (0, 1) and not (group_list_type == 1 and group_list.shape[0] == 1), "group_list_type")
    ends = (group_list.cumsum(0) if group_list_type == 1 else group_list).tolist()
    demand(ends[-1] == rows.shape[0] and ends == sorted(ends) and ends[0] >= 0, f"groups end at {ends}")
    start = 0
    for index, end in enumerate(ends):
        product = rows[start:end].to(torch.float32) @ matrices[index].to(torch.float32)
        result[start:end] = product.to(result.dtype)
        start = end


@kernel("aclnnGroupedMatmulV4", "LLLLLLLLTLLLIIIILLL")
def grouped_matmul_v4(*arguments: Any) -> None:
    *given, out, _activated, _dynamic = arguments
    _grouped(*(*given, out))


@kernel("aclnnGroupedMatmulV5", "LLLLLLLLTLLLIIIIALLL")
def grouped_matmul_v5(*arguments: Any) -> None:
    *given, tuning, out, _activated, _dynamic = arguments
    demand(not tuning, "not simulated")
    _grouped(*(*given, out))


@kernel("aclnnMoeFinalizeRoutingV2", "TTTTTTTIT")
def finalize_routing_v2(
    rows: Tensor,
    places: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor,
    experts: Tensor | None,
    mode: int,
    out: Tensor,
) -> None:
    """Sum each token's rows, weighted. mode 0: places are numbered choice by choice; 2: token by token."""
    demand(skip1 is None and skip2 is None and bias is None and experts is None and mode in (0, 2), "not simulated")
    demand(rows.dtype == scales.dtype == out.dtype, f"rows {rows.dtype}, scales {scales.dtype}")
    tokens, chosen = scales.shape
    places = places.to(torch.int64)
    at = places.view(tokens, chosen) if mode == 2 else places.view(chosen, tokens).t()
    out.copy_((rows.to(torch.float32)[at] * scales.to(torch.float32).unsqueeze(-1)).sum(dim=1))


@kernel("aclnnMoeFinalizeRoutingV4", "TTTTTTTTTTTIAAAIT")
def finalize_routing_v4(*arguments: Any) -> None:
    common, extras, mode, ranges, out = arguments[:7], arguments[7:11], arguments[11], arguments[12:15], arguments[16]
    demand(not any(each is not None for each in (*extras, *ranges)) and arguments[15] == 1, "not simulated")
    finalize_routing_v2(*common, mode, out)
