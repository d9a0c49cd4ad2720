"""The rules for ops that choose: routers may differ in ties, and samplers in draws next to a boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import at_least_fp32
from core.common.ops.sampling import sample
from core_conformance.rules.judging import Judged
from core_conformance.rules.tolerances import DRAW_SLACK
from core_conformance.trial import Trial

_INF = float("inf")


def judge_route(trial: Trial, judged: Judged) -> None:
    """Judge weights and indices of `core::moe_route`.

    Each expert chosen ranks, in fp64, as high as the one that the fp64 run has in its place, to the error that the
    ranking has in the dtype it is computed in. Weights are judged in the rows in which all chose the same experts.
    """
    (weights, indices), (eager_weights, eager_indices) = judged.results, judged.eager
    exact_weights, exact_indices = judged.references
    name = f"{judged.name}, indices"
    if indices.shape != exact_indices.shape or indices.dtype != exact_indices.dtype:
        trial.record(name, "T0", _INF, f"{tuple(indices.shape)} {indices.dtype} instead of int64")
        return
    if not indices.numel():
        return
    given, wanted = indices.detach().cpu(), exact_indices.cpu()
    trial.record(name, "T0", *_rank_gap(given, wanted, judged.kwargs), like=indices)
    rows = []
    for chosen, values in ((given, weights), (eager_indices.cpu(), eager_weights), (wanted, exact_weights)):
        order = chosen.argsort(-1)
        rows.append((chosen.gather(-1, order), values.detach().cpu().gather(-1, order)))
    same = ((rows[0][0] == rows[2][0]) & (rows[1][0] == rows[2][0])).all(-1)
    if not trial.require(bool(same.any()), f"{judged.name}: no token has the experts of the fp64 run"):
        return
    num_tied = int((~same).sum())
    if num_tied:
        trial.note(f"{judged.name}: {num_tied} of {len(same)} tokens have near-ties and were judged by rank alone")
    result, eager, exact = (values[same] for _, values in rows)
    judged.judge(trial, f"{judged.name}, weights", result, eager, lambda: exact)


def _rank_gap(given: Tensor, wanted: Tensor, kwargs: Mapping[str, Any]) -> tuple[float, str]:
    """Return the difference in rank of the chosen experts (T, k) from the right ones, divided by what rounding
    explains."""
    num_experts = kwargs["logits"].shape[1]
    outside = (given < 0) | (given >= num_experts)
    if outside.any():
        return _INF, f"{int(outside.sum())} indices lie outside 0 to {num_experts - 1}"
    ordered = given.sort(-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return _INF, "an expert is chosen twice for one token"
    ranking, excuse, doubtful = _ranking(kwargs)
    own, right = ranking.gather(-1, given), ranking.gather(-1, wanted)
    if not kwargs.get("sorted", True):
        own, right = own.sort(-1).values, right.sort(-1).values
    gap = (own - right).abs().amax(-1)[~doubtful]
    ratio = float((gap / excuse[~doubtful]).max()) if gap.numel() else 0.0
    return ratio, "" if ratio <= 1 else f"{int((gap > excuse[~doubtful]).sum())} tokens have an expert that ranks lower"


def _ranking(kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return in fp64 the score that ranks each expert (T, E), its error (T,), and at which tokens groups nearly tie."""
    compute = kwargs.get("compute_dtype") or at_least_fp32(kwargs["logits"].dtype)
    wide, narrow = (_scores(kwargs, dtype).double() for dtype in (torch.float64, compute))
    finite = wide.abs().amax(-1)
    excuse = 4 * (wide - narrow).abs().amax(-1) + 2 * torch.finfo(compute).eps * finite
    count = kwargs.get("num_groups", 0)
    if not count:
        return wide, excuse, torch.zeros(len(wide), dtype=torch.bool)
    groups = wide.unflatten(-1, (count, -1))
    scores = groups.sort(-1, descending=True).values[..., : kwargs.get("scored_per_group", 2)].sum(-1)
    best = scores.sort(-1, descending=True)
    kept = kwargs["top_groups"]
    margin = best.values[:, kept - 1] - best.values[:, kept] if kept < count else torch.full((len(wide),), _INF)
    hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best.indices[:, :kept], False)
    return groups.masked_fill(hidden[..., None], -_INF).flatten(-2), excuse, margin <= 2 * excuse


def _scores(kwargs: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the scores with the bias that selects, computed in a dtype."""
    logits = kwargs["logits"].detach().cpu().to(dtype)
    scoring = kwargs.get("scoring", "softmax")
    if scoring == "softmax":
        powers = torch.exp(logits - logits.amax(-1, keepdim=True))
        scores = powers / powers.sum(-1, keepdim=True)
    elif scoring == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    elif scoring == "sqrtsoftplus":
        scores = torch.sqrt(functional.softplus(logits))
    else:
        scores = logits
    bias = kwargs.get("bias")
    return scores if bias is None else scores + bias.detach().cpu().to(dtype)


_INF = float("inf")


def judge_sample(trial: Trial, judged: Judged) -> None:
    """Judge the tokens of `core::sample`.

    A greedy row's token has the largest logit. Any other token lies, in order of falling logit, between the tokens that
    fp64 draws when the random number and top-p are shifted down and up by `DRAW_SLACK`.
    """
    (tokens,), (exact,) = judged.results, judged.references
    name = f"{judged.name}, tokens"
    if tokens.shape != exact.shape or tokens.dtype != exact.dtype:
        trial.record(name, "T0", _INF, f"{tuple(tokens.shape)} {tokens.dtype} instead of {tuple(exact.shape)} int64")
        return
    if not tokens.numel():
        return
    given, wanted = tokens.detach().cpu(), exact.cpu()
    wrong = _unexplained(given, judged.kwargs)
    reason = f"{int(wrong.sum())} of {len(wrong)} rows have a token that their draw does not lead to"
    trial.record(name, "T0", _INF if wrong.any() else 0.0, reason if wrong.any() else "", like=tokens)
    excused = int(((given != wanted) & ~wrong).sum())
    if excused:
        trial.note(f"{judged.name}: {excused} of {len(wrong)} draws lie within {DRAW_SLACK:g} of a boundary")


def _unexplained(tokens: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return which rows have a token that no rounding explains."""
    logits = kwargs["logits"].detach().cpu().double()
    params = kwargs["sampling_params"].detach().cpu().double()
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    own = tokens.clamp(0, logits.shape[1] - 1)
    ranks = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    bounds = []
    for sign in (-1, 1):
        # A larger share of top-p moves the same draw to a later token.
        moved = params + sign * DRAW_SLACK * torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        moved[:, 2] = torch.where(params[:, 2] < 1, moved[:, 2], params[:, 2])
        moved[:, 3].clamp_(0.0, 1.0)
        bounds.append(ranks.gather(1, sample(logits, moved)[:, None])[:, 0])
    rank = ranks.gather(1, own[:, None])[:, 0]
    right = (bounds[0] <= rank) & (rank <= bounds[1])
    most_likely = logits.gather(1, own[:, None])[:, 0] == logits.amax(-1)
    wrong: Tensor = ~(inside & torch.where(params[:, 0] > 0, right, most_likely))
    return wrong
