"""A model without any cache: the logits of the next token by its forward over whole sequences.

Legend of shapes: B sequences, T tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.engine.models.forward import whole_logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How sequences are laid out for one call of the forward."""

    #: Whether they are padded on the right, to one length; else all sequences of a call are as long, and the forward is
    #: called as the model's own generation calls it.
    padded: bool
    #: Whether an attention mask tells the padding.
    masked: bool = False
    #: Whether the forward is told to compute the logits behind last tokens alone (`logits_to_keep`): of each sequence
    #: at the last place of any, B each in place of T.
    last_only: bool = False
    #: Whether a call may hold several sequences.
    batched: bool = False
    #: Whether the forward is asked for a cache, which is dropped: as the model's own generation computes a prompt.
    as_prompt: bool = False
    #: Whether the model's code loops over tokens in Python: a graph would hold each turn.
    loops: bool = False

    @property
    def traceable(self) -> bool:
        """Whether graphs of it are worth having."""
        return self.padded and not self.loops


class WholeForward:
    """The forward of a model on whole sequences, laid out in one way; a function to trace where they are padded."""

    def __init__(self, model: Any, way: Way) -> None:
        self.model, self.way = model, way

    def __call__(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, V) behind the last token of each sequence.

        input_ids: (B, T) int64. lengths: (B,) int64, of each sequence at least 1; what lies behind is padding.
        """
        if not self.way.padded:
            return whole_logits(self.model, input_ids, use_cache=self.way.as_prompt)
        more: dict[str, Any] = {"use_cache": self.way.as_prompt, "return_dict": True}
        if self.way.masked:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            more["attention_mask"] = (positions < lengths[:, None]).to(torch.int64)
        rows, last = torch.arange(input_ids.shape[0], device=input_ids.device), lengths - 1
        if self.way.last_only:
            more["logits_to_keep"] = last
        logits: Tensor = self.model(input_ids=input_ids, **more).logits
        return logits[rows, rows if self.way.last_only else last]


def whole_inputs(
    sequences: Sequence[Sequence[int]], device: torch.device, *, width: int | None = None
) -> dict[str, Tensor]:
    """Return the inputs of these sequences, padded with zeros up to width, by default the longest sequence's length."""
    width = width or max(map(len, sequences))
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences])
    lengths = torch.tensor(list(map(len, sequences)))
    return {name: each.to(device, non_blocking=True) for name, each in (("input_ids", ids), ("lengths", lengths))}
