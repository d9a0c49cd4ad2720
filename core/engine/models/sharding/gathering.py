"""The most likely token where each of several processes has the logits of a part of the vocabulary.

Legend of shapes: R rows of logits, P processes, V vocabulary, of which each process has V / P neighbours.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.common.ops.collective.collectives import ALL_GATHER, group_size
from core.common.ops.sampling import ARGMAX
from core.engine.models.sharding.cuts import rank_in


class Gathering:
    """A forward hook that gives the whole of what each process computes a part of, along the last dimension."""

    def __init__(self, group: str) -> None:
        self.group = group
        #: What is given: the whole, this process's part, or that once for each process.
        self.shows: Literal["whole", "part", "repeated"] = "whole"
        #: Of the part that was repeated last.
        self.width = 0

    def __call__(self, module: nn.Module, inputs: Any, result: Tensor) -> Tensor:
        """Return what `shows` says."""
        if self.shows == "part":
            return result
        if self.shows == "repeated":
            self.width = result.shape[-1]
            return torch.cat([result] * group_size(self.group), dim=-1)
        return self.whole(result)

    def whole(self, part: Tensor) -> Tensor:
        """Return what all processes have."""
        gathered: Tensor = ALL_GATHER.overload(part, self.group, part.dim() - 1)
        return gathered


class HeadParts:
    """What the calls of one runner do where each process has a part of the results of the model's head."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        #: Whether each process chooses among the logits that it has; None before the first comparison.
        self.chosen_apart: bool | None = None

    @staticmethod
    def of(model: Any) -> HeadParts | None:
        """Return those of a model; None where the head is whole."""
        get = getattr(model, "get_output_embeddings", None)
        gathering = getattr(get() if callable(get) else None, "gathering", None)
        return None if gathering is None else HeadParts(gathering)

    def compare(self, logits: Tensor, repeated: Tensor) -> None:
        """Note whether processes can choose apart, all of them the same: `is_pointwise` in every comparison of each.

        Both (R, V): the model's logits, and those where all processes had the part of this one.
        """
        group = self.gathering.group
        place = {"number": rank_in(group), "size": group_size(group)}
        found = logits.dtype.itemsize <= 4 and is_pointwise(logits, repeated, width=self.gathering.width, **place)
        told = torch.tensor([found and self.chosen_apart is not False], dtype=torch.int32, device=logits.device)
        self.chosen_apart = bool(ALL_GATHER.overload(told, group, 0).all())


def is_pointwise(logits: Tensor, repeated: Tensor, *, width: int, number: int, size: int) -> bool:
    """Tell whether a model does to each result of its head the same, whatever the others are and wherever it stands.

    logits (R, V): of `size` parts of this width one after another. repeated (R, V): of the part of this number, that
    often.
    """
    if logits.shape != repeated.shape or logits.shape[-1] != size * width:
        return False
    parts, again = (each.unflatten(-1, (-1, width)) for each in (logits, repeated))
    rounding = 8 * torch.finfo(logits.dtype).eps  # the end of a row may be rounded otherwise than its middle
    return torch.allclose(again, parts[..., number, None, :].expand_as(again), rounding, 0.0)


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
