"""Pairs of a token and an expert, sorted by expert for `core::quantized_grouped_linear`, and the weighted sums of what
that gives: one launch each, in place of a dozen of torch's.

Shapes: T tokens, k experts per token, n = T * k pairs, E experts, D hidden size. Pairs are numbered by token.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import TYPES

_BLOCK = 2048  # pairs that a program looks at together
_FEW = 2**18
"""Elements of the sums up to which they are cut into smaller parts, so that every multiprocessor has some."""


def _fake_order(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs = indices.new_empty((indices.shape[0] * indices.shape[1],), dtype=torch.int64)
    return indices.new_empty((num_experts,), dtype=torch.int32), pairs, torch.empty_like(pairs)


def _sorted(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    elsewhere = (indices < 0) | (indices >= num_experts)
    experts, order = torch.sort(torch.where(elsewhere, num_experts, indices).flatten(), stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=order.device), right=True, out_int32=True)
    places = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return ends, order // indices.shape[1], places


@own_kernel(
    "order_pairs(Tensor indices, int num_experts) -> (Tensor ends, Tensor tokens, Tensor places)", _fake_order, _sorted
)
def order_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the pairs of indices (T, k) by expert, those of one in their order, those of none (not in [0, E)) last.

    Returns ends (E,) int32, where the sorted pairs of each expert end; tokens (n,) int64, the token of each sorted
    pair; places (n,) int64, where each pair went.
    """
    count, top_k = indices.numel(), indices.shape[1]
    ends = torch.empty(num_experts, dtype=torch.int32, device=indices.device)
    tokens, places = (torch.empty(count, dtype=torch.int64, device=indices.device) for _ in range(2))
    block = min(max(triton.next_power_of_2(count), 128), _BLOCK)
    launching.launch(
        order_kernel, (num_experts + 1,), indices.contiguous(), ends, tokens, places, count, num_experts, top_k,
        BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return ends, tokens, places


def _fake_sum(rows: Tensor, places: Tensor, weights: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    dtype = out_dtype or torch.promote_types(rows.dtype, weights.dtype)
    return rows.new_empty((weights.shape[0], rows.shape[1]), dtype=dtype)


def _summed(rows: Tensor, places: Tensor, weights: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    total = (rows[places].view(*weights.shape, rows.shape[1]) * weights[..., None]).sum(1)
    return total if out_dtype is None else total.to(out_dtype)


@own_kernel(
    "weighted_sum(Tensor rows, Tensor places, Tensor weights, *, ScalarType? out_dtype=None) -> Tensor",
    _fake_sum,
    _summed,
)
def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return (T, D): of each token the sum of its pairs' rows times weights (T, k), in their order.

    rows (n, D) by expert, places as `order_pairs` gives them. A product is rounded to the common dtype of rows and
    weights; the sum is in fp32, rounded to that dtype and then to out_dtype, if that is given.
    """
    tokens, top_k = weights.shape
    size, dtype = rows.shape[1], torch.promote_types(rows.dtype, weights.dtype)
    out = torch.empty((tokens, size), dtype=out_dtype or dtype, device=rows.device)
    block = min(triton.next_power_of_2(size), 256 if out.numel() <= _FEW else 1024)
    launching.launch(
        weighted_sum_kernel, (tokens * triton.cdiv(size, block),),
        rows.contiguous(), places.contiguous(), weights.contiguous(), out, size,
        TOP_K=top_k, PRODUCT=TYPES[dtype], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _experts(indices, at, num_pairs, num_experts):
    """Return the experts of pairs: E for pairs of none, E + 1 behind the last pair."""
    chosen = tl.load(indices + at, mask=at < num_pairs, other=0)
    chosen = tl.where((chosen < 0) | (chosen >= num_experts), num_experts, chosen)
    return tl.where(at < num_pairs, chosen, num_experts + 1)


@triton.jit
def order_kernel(
    indices, ends, tokens, places, num_pairs, num_experts, top_k, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """One expert, or E for the pairs of none: a counting sort, in which each program counts all pairs by itself."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin = 0
    own = 0
    for start in range(0, num_pairs, BLOCK):
        chosen = _experts(indices, start + lanes, num_pairs, num_experts)
        begin += tl.sum((chosen < expert).to(tl.int32), axis=0)
        own += tl.sum((chosen == expert).to(tl.int32), axis=0)
    tl.store(ends + expert, begin + own, mask=expert < num_experts)
    for start in range(0, num_pairs, BLOCK):
        at = start + lanes
        mine = _experts(indices, at, num_pairs, num_experts) == expert
        place = begin + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(tokens + place, (at // top_k).to(tl.int64), mask=mine)
        tl.store(places + at, place.to(tl.int64), mask=mine)
        begin += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def weighted_sum_kernel(
    rows, places, weights, out, size, TOP_K: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token."""
    blocks = tl.cdiv(size, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        row = tl.load(rows + tl.load(places + pair) * size + columns, mask=inside, other=0.0).to(tl.float32)
        total += (row * tl.load(weights + pair).to(tl.float32)).to(PRODUCT).to(tl.float32)
    tl.store(out + token * size + columns, total.to(PRODUCT).to(out.dtype.element_ty), mask=inside)
