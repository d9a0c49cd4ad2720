"""The most likely token where each of several processes has the logits of a part of the vocabulary.

Legend of shapes: R rows of logits, P processes, V vocabulary, of which each process has V / P neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.common.ops.collective.collectives import ALL_GATHER, group_size
from core.common.ops.sampling import ARGMAX


class Gathering:
    """A forward hook that gives the whole of what each process computes a part of, along the last dimension."""

    def __init__(self, group: str) -> None:
        self.group = group
        #: Whether the part is what is wanted.
        self.skipped = False
        #: Whether what follows does to each part what it does to the whole, so that a choice can be made in parts.
        self.is_pointwise = False

    def __call__(self, module: nn.Module, inputs: Any, result: Tensor) -> Tensor:
        """Return the result of all processes, or that of this one."""
        return result if self.skipped else self.whole(result)

    def whole(self, part: Tensor) -> Tensor:
        """Return what all processes have."""
        gathered: Tensor = ALL_GATHER.overload(part, self.group, part.dim() - 1)
        return gathered


def gathering_of(model: Any) -> Gathering | None:
    """Return what gathers the results of a model's head; None where the head is whole."""
    get = getattr(model, "get_output_embeddings", None)
    found: Gathering | None = getattr(get() if callable(get) else None, "gathering", None)
    return found


def argmax_of_parts(part: Tensor, group: str) -> Tensor:
    """Return what `core::argmax` gives for the logits of all processes, int64 of shape (R,), on each of them.

    part: (R, V / P) in a floating dtype of at most 4 bytes, of this process of the group. 8 bytes for each row and
    process are sent.
    """
    size = group_size(group)
    tokens = ARGMAX.overload(part).unsqueeze(1)
    best = part.gather(1, tokens).to(torch.float32)  # exact
    told = torch.cat((best.view(torch.int32), tokens.to(torch.int32)), dim=1)
    everyone = ALL_GATHER.overload(told, group, 1).view(-1, size, 2)
    # Of equal logits the first process has the lowest id.
    winner = ARGMAX.overload(everyone[:, :, 0].contiguous().view(torch.float32)).unsqueeze(1)
    own = everyone[:, :, 1].gather(1, winner).to(torch.int64)
    found: Tensor = (winner * part.shape[1] + own).squeeze(1)
    return found
