"""Judges the use of a language model's logits: the chosen token (T3) and the distribution over the next token (KL).

Shapes: n rows of logits over a vocabulary V, (n, V); R is the fp64 reference, E eager, G what is judged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core_conformance.rules.tolerances import KL_MEAN_FACTOR, KL_ROW_FACTOR


def rounding_bound(eager: Tensor, reference: Tensor) -> float:
    """Return the largest error of one logit that is rounding: the bound of T1 on the maximum."""
    scale = float(reference.double().pow(2).mean().sqrt())
    return 3 * float((eager.double() - reference).abs().max()) + torch.finfo(eager.dtype).eps * scale


def token_slip(token: int, logits: Tensor, reference: Tensor, rounding: float) -> tuple[float, str]:
    """Judge one greedy token by T3; return how far it is from the best one over what is allowed, and why it is wrong.

    logits, reference: the row (V,) it was taken from, and the fp64 one. rounding: what `rounding_bound` says; a larger
    error excuses no token, since it is a fault of its own. At most 1 passes.
    """
    if not bool(logits.isfinite().all()):
        return math.inf, "its logits are not finite"
    best = int(logits.argmax())
    if float(logits[token]) < float(logits[best]):
        return math.inf, f"took {token} where its own logits prefer {best} by {float(logits[best] - logits[token]):.2g}"
    gap = float(reference.max() - reference[token])
    if gap == 0:
        return 0.0, ""
    error = float((logits.double() - reference).abs().max())
    # Both of the two tokens may be off by the error.
    allowed = 2 * min(error, rounding)
    ratio = gap / allowed if allowed else math.inf
    if ratio <= 1:
        return ratio, ""
    return ratio, (
        f"took {token} where fp64 prefers {int(reference.argmax())} by {gap:.3g} (its largest error there is "
        f"{error:.2g}, and up to {rounding:.2g} is rounding)"
    )


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """Return KL(R||G) of each row's next-token distributions in nats, (n,) fp64; NaN where the logits are."""
    wanted = torch.log_softmax(reference.double(), dim=-1)
    off = torch.log_softmax(logits.double(), dim=-1) - wanted
    # Each term is positive. Of the sum of p * -off the first order is zero and would cancel, with the result in fp32.
    return (wanted.exp() * (torch.expm1(off) - off)).sum(dim=-1)


def judge_divergence(result: Tensor, eager: Tensor, reference: Tensor) -> tuple[float, str]:
    """Compare KL(R||G) with KL(R||E), on average and in the worst row; return measured over bound, and why it fails.

    At most 1 passes. The floor is the divergence of logits that are off by the floor of T1, `eps / 4 * rms(R)`.
    """
    ours, theirs = divergences(reference, result), divergences(reference, eager)
    if not bool(ours.isfinite().all()):
        return math.inf, "its logits are not finite"
    scale = float(reference.double().pow(2).mean().sqrt())
    floor = (torch.finfo(eager.dtype).eps / 4 * scale) ** 2 / 2
    ratios = {
        "on average": float(ours.mean()) / (KL_MEAN_FACTOR * float(theirs.mean()) + floor),
        f"in row {int(ours.argmax())}": float(ours.max()) / (KL_ROW_FACTOR * float(theirs.max()) + floor),
    }
    where, ratio = max(ratios.items(), key=lambda item: item[1])
    if ratio <= 1:
        return ratio, ""
    return ratio, (
        f"divergence over bound {where}: {ratio:.3g} (allowed: 1); KL(R||G) is {float(ours.mean()):.2g} nats on "
        f"average and {float(ours.max()):.2g} at most, "
        f"KL(R||E) {float(theirs.mean()):.2g} and {float(theirs.max()):.2g}"
    )
