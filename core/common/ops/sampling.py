"""`core::sample` and `core::argmax`: the next token of each row of logits, greedily or by random numbers drawn
beforehand.

Legend of shapes: R rows of logits, V vocabulary.

The parameters of a row are four numbers: temperature (0 chooses the most likely token and reads no other), top-k (0 for
no limit), top-p (1 for no limit) and a number drawn uniformly from [0, 1), at which the cumulative distribution is
inverted. So a choice has no state, and a captured graph repeats it.

Top-k is Fan et al., arXiv 1805.04833; top-p is Holtzman et al., arXiv 1904.09751: the smallest set of most likely
tokens whose probability reaches p.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32, check, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare

NUM_PARAMS = 4


def argmax(logits: Tensor) -> Tensor:
    """Return the most likely token of each row, int64 of shape (R,): of equal ones the lowest id.

    logits: (R, V), V at least 1, compared in their own dtype; a logit may be -inf. NaN counts as the largest, as in
    torch, so that a row with NaN gives the id of its first one.
    """
    return logits.argmax(dim=-1)


def sample(logits: Tensor, sampling_params: Tensor) -> Tensor:
    """Return the next token of each row, int64 of shape (R,).

    logits: (R, V), V at least 1; a logit may be -inf. sampling_params: (R, 4) float32. Greedy rows are the argmax in
    the logits' dtype. The others are computed in at least fp32, in this order: temperature, top-k, top-p, and the first
    token, by falling logit, at which the probability of all kept up to it exceeds the draw's share of the total; equal
    logits are in the order of their ids. Another order of summation gives another token where the draw lies within
    rounding of a boundary. A row with NaN gives some token and leaves the others alone.
    """
    return torch.where(sampling_params[:, 0] > 0, _invert(logits, sampling_params), logits.argmax(dim=-1))


def _invert(logits: Tensor, sampling_params: Tensor) -> Tensor:
    """Invert the cumulative distribution of every row at its own number; int64 (R,)."""
    temperature, top_k, top_p, uniform = sampling_params.split(1, dim=1)
    # A stable sort, so that equal logits are cut at the same token on every device: the lower id is kept.
    ordered, token_ids = logits.to(at_least_fp32(logits.dtype)).sort(dim=-1, descending=True, stable=True)
    # The maximum goes first, because logits divided by a tiny temperature overflow. Greedy rows divide by 1.
    ordered = (ordered - ordered[:, :1]) / torch.where(temperature > 0, temperature, 1.0)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    # A token stays while those before it fall short of p, the first always; p = 1 keeps all, which rounding could deny.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p) | (top_p >= 1)
    cumulative = (probabilities * kept).cumsum(dim=-1)
    # The first token whose cumulative probability exceeds the draw. A draw can round up to the total itself, which no
    # token exceeds; then it is the last one that has a probability at all.
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    last = ((probabilities > 0) & kept).sum(dim=-1, keepdim=True) - 1
    # A row of NaN has no last token; its first is as good as any and, unlike an index of -1, keeps the device alive.
    return token_ids.gather(1, torch.minimum(index, last).clamp(min=0)).squeeze(1)


def _fake(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def _check_argmax(logits: Tensor, op: str = "argmax") -> None:
    check_floating(op, logits=logits)
    check(logits.dim() == 2 and logits.shape[1] > 0, op, f"logits must be (R, V), not {tuple(logits.shape)}")


def _check_sample(logits: Tensor, sampling_params: Tensor) -> None:
    _check_argmax(logits, "sample")
    check_floating("sample", sampling_params=sampling_params)
    check_shape("sample", (logits.shape[0], NUM_PARAMS), sampling_params=sampling_params)


def _sample_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return rows with each limit alone and with all of them, ties, masked tokens, rows of every kind in one call."""

    def rows(*values: tuple[float, float, float, float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=draw.device)

    draws = (0.03, 0.21, 0.47, 0.68, 0.94)
    limits = {
        "plain": (1.0, 0.0, 1.0),
        "hot": (1.7, 0.0, 1.0),
        "cold": (0.05, 0.0, 1.0),
        "top-k": (0.8, 5.0, 1.0),
        "top-p": (1.0, 0.0, 0.7),
        "all limits": (0.9, 20.0, 0.9),
    }
    calls = {
        name: {"logits": draw(5, 97, scale=3.0), "sampling_params": rows(*((*limit, u) for u in draws))}
        for name, limit in limits.items()
    }
    mixed = rows((0.0, 0.0, 1.0, 0.0), (0.7, 3.0, 1.0, 0.5), (1.0, 0.0, 0.5, 0.999), (0.0, 0.0, 1.0, 0.0))
    logits = {
        "greedy and others": draw(4, 64, scale=3.0),
        "masked tokens": draw(4, 64, scale=3.0),
        "ties": draw(4, 64, scale=2.0).round(),
        "slice of wider rows": draw(4, 200, scale=3.0)[:, 40:140],
        "no rows": draw(0, 64),
    }
    logits["masked tokens"][:, ::3] = float("-inf")
    return calls | {name: {"logits": x, "sampling_params": mixed[: x.shape[0]]} for name, x in logits.items()}


def _argmax_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return rows with ties, masked tokens and infinities, of a vocabulary of one, in wider rows, and none."""
    inf = float("inf")
    logits = {
        "plain": draw(5, 97, scale=3.0),
        "ties": draw(6, 64).round(),
        "masked tokens": draw(4, 64, scale=3.0),
        "infinities": draw(4, 64),
        "zeros of both signs": torch.cat((-draw(4, 4).relu(), draw(4, 4).clamp(max=0.0)), dim=1),
        "one token": draw(3, 1),
        "slice of wider rows": draw(4, 200, scale=3.0)[:, 40:141],
        "no rows": draw(0, 64),
    }
    masked, infinite = logits["masked tokens"], logits["infinities"]
    masked[:, ::3], masked[3] = -inf, -inf
    infinite[0, 7], infinite[1, 9:], infinite[2, 5:7], infinite[3, 63] = inf, inf, inf, inf
    return {name: {"logits": x} for name, x in logits.items()}


SAMPLE = declare(
    CanonicalOp(
        schema="sample(Tensor logits, Tensor sampling_params) -> Tensor",
        reference=sample,
        fake=_fake,
        check=_check_sample,
        calls=_sample_calls,
        seed=21,
    )
)
ARGMAX = declare(
    CanonicalOp(
        schema="argmax(Tensor logits) -> Tensor",
        reference=argmax,
        fake=_fake,
        check=_check_argmax,
        calls=_argmax_calls,
        seed=22,
    )
)
