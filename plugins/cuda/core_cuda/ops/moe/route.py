"""`core::moe_route` in one launch: a warp scores a token's experts, keeps them in registers and picks the best k.

Experts are ranked by integers of the same order as their scores, so that NaN has a place, as the largest, and no expert
is picked twice. A pick is two reductions over a warp: the largest rank, and the lowest expert that has it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.moe.route import MOE_ROUTE
from core_cuda.ops import launching
from core_cuda.ops.conditions import all_of, computes_in_fp32, dtypes
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.sampling.ranks import rank_of, value_of

MAX_EXPERTS = 1024
MAX_TOP_K = 64
_MOST = tl.constexpr(2**31 - 1)
_TAKEN = tl.constexpr(-(2**31))  # a rank below that of every score, for experts already picked and for padding
_HIDDEN = tl.constexpr(-(2**31) + 1)  # below every score too: experts outside the best groups


@triton.jit
def _exp(x):
    """Return exp of fp32 x: base 2, with the rounding error of the exponent added back, which tl.exp leaves out."""
    power = x * 1.4426950408889634
    error = tl.fma(x, 1.4426950408889634, -power) + x * 1.9259629911e-08
    whole = tl.exp2(power)
    return tl.where((whole > 0.0) & (whole < float("inf")), whole + whole * (error * 0.6931471805599453), whole)


@triton.jit
def _log1p(x):
    """Return log(1 + x) of fp32 x from 0 to 1, without the rounding of 1 + x (Kahan's quotient)."""
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.log(rounded) * tl.div_rn(x, tl.where(rounded == 1.0, 1.0, rounded - 1.0)))


@triton.jit
def _softmax(logits, top):
    """Return the softmax of these logits, of which the largest is `top`; logits of minus infinity are padding."""
    powers = tl.where(logits == -float("inf"), 0.0, _exp(logits - top))
    # A row of nothing but minus infinity, or with plus infinity, is NaN, as eager has it.
    powers = tl.where(tl.abs(top) == float("inf"), float("nan"), powers)
    return powers, tl.sum(powers)


@triton.jit
def _score(logits, SCORING: tl.constexpr):
    """Return the scores of one token's logits; of padding, minus infinity, any."""
    if SCORING == "softmax":
        powers, total = _softmax(logits, tl.max(tl.max(logits, axis=1), axis=0))
        # max drops NaN; the sum has it.
        scores = tl.div_rn(powers, total + tl.zeros_like(powers))
    elif SCORING == "sigmoid":
        scores = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + _exp(-logits))
    elif SCORING == "sqrtsoftplus":
        least = tl.where(logits > 0.0, logits, tl.where(logits != logits, logits, 0.0))
        scores = tl.sqrt_rn(least + _log1p(_exp(-tl.abs(logits))))
    else:
        tl.static_assert(SCORING == "softmax_selected", "a scoring that core::moe_route does not have")
        scores = logits
    return scores


@triton.jit
def _hide_groups(
    rank, place, num_groups, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, SCORED: tl.constexpr
):
    """Lower the ranks (GROUPS, SIZE) of all but the TOP groups, by the sum of their SCORED best."""
    left = rank
    total = tl.zeros((GROUPS,), tl.float32)
    for _ in tl.static_range(SCORED):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], place, SIZE), axis=1)
        left = tl.where(place == first[:, None], _TAKEN, left)
        total += value_of(best)
    group = tl.arange(0, GROUPS)
    group_rank = tl.where(group < num_groups, rank_of(total), _TAKEN)
    kept = tl.zeros((GROUPS,), tl.int32)
    for _ in tl.static_range(TOP):
        best = tl.max(group_rank, axis=0)
        first = tl.min(tl.where(group_rank == best, group, GROUPS), axis=0)
        kept = tl.where(group == first, 1, kept)
        group_rank = tl.where(group == first, _TAKEN, group_rank)
    return tl.where((kept[:, None] == 0) & (rank != _TAKEN), _HIDDEN, rank)


@triton.jit
def _route_kernel(
    logits, bias, weights, indices, stride, num_groups, group_size, eps, scale,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SCORED: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token. Its experts are a tile (GROUPS, SIZE) of num_groups groups of group_size, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    expert = group * group_size + place
    inside = (group < num_groups) & (place < group_size)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if HAS_BIAS:
        shift = tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(logits + token * stride + expert, mask=inside, other=-float("inf")).to(tl.float32)
    scores = _score(row, SCORING)
    own_rank = tl.where(inside, rank_of(scores), _TAKEN)
    rank = own_rank
    if HAS_BIAS:
        rank = tl.where(inside, rank_of(scores + shift), _TAKEN)
    if TOP_GROUPS > 0:
        rank = _hide_groups(rank, place, num_groups, GROUPS, SIZE, TOP_GROUPS, SCORED)
    slot = tl.arange(0, PICKS)
    chosen = tl.zeros((PICKS,), tl.int32)
    ranks = tl.zeros((PICKS,), tl.int32)
    for pick in range(TOP_K):
        best = tl.max(tl.max(rank, axis=1), axis=0)
        first = tl.min(tl.min(tl.where(rank == best, expert, _MOST), axis=1), axis=0)
        own = (expert == first) & inside
        if HAS_BIAS:
            best = tl.max(tl.max(tl.where(own, own_rank, _TAKEN), axis=1), axis=0)
        rank = tl.where(own, _TAKEN, rank)
        chosen = tl.where(slot == pick, first, chosen)
        ranks = tl.where(slot == pick, best, ranks)
    values = value_of(ranks)
    real = slot < TOP_K
    if SCORING == "softmax_selected":
        selected = tl.where(real, values, -float("inf"))
        powers, total = _softmax(selected, tl.max(selected, axis=0))
        values = tl.div_rn(powers, total + tl.zeros_like(powers))
    if RENORMALIZE:
        total = tl.sum(tl.where(real, values, 0.0), axis=0) + eps
        values = tl.div_rn(values, total + tl.zeros_like(values))
    if SCALED:
        values *= scale
    at = token * TOP_K + slot
    tl.store(weights + at, values.to(weights.dtype.element_ty), mask=real)
    tl.store(indices + at, chosen.to(tl.int64), mask=real)


@kernel_of(MOE_ROUTE)
def moe_route(
    logits: Tensor, top_k: int, bias: Tensor | None, scale: float, num_groups: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Choose the experts; always best first, and of equal scores those of the lowest number."""
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, top_k), dtype=options["out_dtype"] or logits.dtype)
    indices = logits.new_empty((num_tokens, top_k), dtype=torch.int64)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    groups = num_groups or 1
    size = num_experts // groups
    launching.launch(
        _route_kernel, (num_tokens,), logits, None if bias is None else bias.contiguous(), weights, indices,
        logits.stride(0), groups, size, options["renormalize_eps"], scale,
        TOP_K=top_k, PICKS=triton.next_power_of_2(top_k), GROUPS=triton.next_power_of_2(groups),
        SIZE=triton.next_power_of_2(size), TOP_GROUPS=options["top_groups"] if num_groups else 0,
        SCORED=options["scored_per_group"], SCORING=options["scoring"], HAS_BIAS=bias is not None,
        RENORMALIZE=options["renormalize"], SCALED=scale != 1.0, num_warps=1,
    )  # fmt: skip
    return weights, indices


def _fits(call: OpCall) -> str | None:
    """Refuse more experts, or more of them for a token, than the registers of a warp hold."""
    num_experts, top_k = call.args["logits"].shape[1], call.args["top_k"]
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        return f"{top_k} of {num_experts} experts, and the kernel chooses up to {MAX_TOP_K} of up to {MAX_EXPERTS}"
    return None


route_condition = all_of(dtypes, computes_in_fp32("logits"), _fits)
"""Why the kernel cannot take a call, or None: fp64, a compute dtype that loses digits, too many experts."""
