"""The rule for samplers: the token drawn is the right one, up to draws that lie within rounding of a boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.sampling import sample
from core_conformance.rules.judging import Judged
from core_conformance.rules.tolerances import DRAW_SLACK
from core_conformance.trial import Trial

_INF = float("inf")


def judge_sample(trial: Trial, judged: Judged) -> None:
    """Judge the tokens of `core::sample`.

    A greedy row's token has the largest logit. Any other token stands, in order of falling logit, between those that
    fp64 draws at numbers, and with top-p, that are off by `DRAW_SLACK`.
    """
    (tokens,), (exact,) = judged.results, judged.references
    name = f"{judged.name}, tokens"
    if tokens.shape != exact.shape or tokens.dtype != exact.dtype:
        trial.record(name, "T0", _INF, f"{tuple(tokens.shape)} {tokens.dtype} instead of {tuple(exact.shape)} int64")
        return
    if not tokens.numel():
        return
    given, wanted = tokens.detach().cpu(), exact.cpu()
    wrong = _wrong(given, judged.kwargs)
    reason = f"{int(wrong.sum())} of {len(wrong)} rows have a token that their draw does not lead to"
    trial.record(name, "T0", _INF if wrong.any() else 0.0, reason if wrong.any() else "", like=tokens)
    excused = int(((given != wanted) & ~wrong).sum())
    if excused:
        trial.note(f"{judged.name}: {excused} of {len(wrong)} draws lie within {DRAW_SLACK:g} of a boundary")


def _wrong(tokens: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
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
