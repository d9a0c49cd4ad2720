"""What the attention ops share: capping scores, and a softmax with sinks that hidden rows survive."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def soft_capped(scores: Tensor, softcap: float) -> Tensor:
    """Return `c * tanh(scores / c)` for c = softcap, the scores themselves for 0 (Gemma 2, arXiv 2408.00118)."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def exponentials(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax's numerator and denominator over the last dimension, which is kept, in the dtype of scores.

    Of a row that holds nothing but -inf they are 0 and 1: its softmax is zero, not NaN. sinks: logits that count in the
    denominator only, of a shape that broadcasts against scores with one column (Xiao et al., arXiv 2309.17453, as
    gpt-oss uses them).
    """
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores.dtype)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return weights, total.masked_fill(total == 0, 1.0)
