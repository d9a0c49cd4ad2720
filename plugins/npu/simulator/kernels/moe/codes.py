"""Routing that turns the sorted rows into codes: aclnnMoeInitRoutingQuantV2."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.bounds import CODE_MAX, demand
from simulator.kernels.moe.experts import FLOATS
from simulator.marshal import kernel

DROP, SUMS, COUNTS = 1, 1, 2


def _codes(rows: Tensor, experts: Tensor, scale: Tensor | None, offset: Tensor | None, mode: int) -> tuple[Tensor, ...]:
    """Return codes of rows, and their scales. mode 0: by one scale and offset; 1: by each row's largest value."""
    wide = rows.float()
    if mode == 0:
        demand(scale is not None and offset is not None and scale.numel() == offset.numel() == 1, "a scale, an offset")
        assert scale is not None and offset is not None
        return ((wide * scale.float() + offset.float()).round().clamp(-CODE_MAX - 1, CODE_MAX),)
    if scale is not None:
        demand(scale.dim() == 2 and scale.shape[1] == rows.shape[1], f"smoothing factors {tuple(scale.shape)}")
        wide = wide * (scale if scale.shape[0] == 1 else scale[experts]).float()
    by_row = wide.abs().amax(-1) / CODE_MAX
    return (wide / by_row.unsqueeze(-1)).nan_to_num(0.0).round(), by_row


@kernel("aclnnMoeInitRoutingQuantV2", "TTTTIIIIIbITTTTT")
def init_routing_codes(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    capacity: int,
    expert_num: int,
    drop_mode: int,
    tokens_mode: int,
    counts_first: bool,
    quant_mode: int,
    expanded_x: Tensor,
    places: Tensor,
    tokens: Tensor | None,
    before_capacity: Tensor | None,
    expanded_scale: Tensor | None,
) -> None:
    """Sort copies of the rows by expert: the first of them or, by capacity, a block for each; -1 for no place."""
    demand(x.dtype in FLOATS and expert_idx.dtype == torch.int32, f"x {x.dtype}, experts {expert_idx.dtype}")
    flat = expert_idx.reshape(-1).long()
    demand(int(flat.min()) >= 0 and int(flat.max()) < expert_num, "an expert beyond")
    sorted_experts, order = flat.sort(stable=True)
    counts = torch.bincount(flat, minlength=expert_num)
    if before_capacity is not None:
        before_capacity.copy_(counts)
    if tokens is not None:
        tokens.copy_(counts if tokens_mode == COUNTS else counts.cumsum(0))
    rank = torch.arange(flat.numel()) - (counts.cumsum(0) - counts)[sorted_experts]
    target, fits = torch.arange(flat.numel()), torch.ones(flat.numel(), dtype=torch.bool)
    if drop_mode == DROP:
        demand(0 < capacity <= x.shape[0], f"capacity {capacity} of {x.shape[0]} rows")
        target, fits = sorted_experts * capacity + rank, rank < capacity
    elif active_num > 0:
        fits = target < active_num
    places.copy_(torch.full(flat.shape, -1).scatter(0, order, torch.where(fits, target, -1)))
    made = _codes(x[order // expert_idx.shape[1]], sorted_experts, scale, offset, quant_mode)
    rows = torch.zeros(expanded_x.numel() // x.shape[1], x.shape[1])
    rows[target[fits]] = made[0][fits]
    expanded_x.copy_(rows.view(expanded_x.shape))
    if expanded_scale is not None:
        scales = torch.zeros(expanded_scale.shape)
        scales[target[fits]] = made[1][fits]
        expanded_scale.copy_(scales)
