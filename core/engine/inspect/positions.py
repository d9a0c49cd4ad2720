"""Layers that count positions by themselves, from what transformers' cache says was seen before: Llama 4's temperature.

A step holds tokens of several sequences one after the other, and no number of tokens came before all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.engine.inspect.attention import SIZE, NotPageable, implementation, register_interfaces
from core.engine.models.forward import accepted_arguments


class TokenPositions:
    """What stands in for transformers' cache: it keeps nothing, and says of each token how many came before the step.

    A layer that adds it to `arange(T)` has the position of each token, whichever sequence it belongs to.
    """

    def __init__(self, position_ids: Tensor) -> None:
        """position_ids: (T,)."""
        self._before = position_ids - torch.arange(position_ids.shape[0], device=position_ids.device)

    def get_seq_length(self, layer_idx: int | None = None) -> Tensor:
        """Return (T,): the position of each token less its place in the step."""
        return self._before

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the step's own keys and values: the attention op keeps them."""
        return key_states, value_states


class _Asked(TokenPositions):
    """Notes that a layer asks."""

    asked = False

    def get_seq_length(self, layer_idx: int | None = None) -> Tensor:
        # The model as a whole asks for no layer, to count positions where it was given none.
        self.asked |= layer_idx is not None
        return super().get_seq_length(layer_idx)


def counts_positions(model: Any) -> bool:
    """Return whether a layer of the model asks how many tokens came before, and so has to be given `TokenPositions`.

    Runs the model once on a few tokens. Raises `NotPageable` where a layer asks, and the model takes no tensor for it.
    """
    if "past_key_values" not in accepted_arguments(model):
        return False
    register_interfaces()
    positions = torch.arange(4, device=next(model.parameters()).device)
    asked = _Asked(positions)
    try:
        with torch.no_grad(), implementation(model, SIZE):
            model(input_ids=positions[None], position_ids=positions[None], past_key_values=asked, use_cache=False)
    except NotPageable:
        raise
    except Exception as error:
        if asked.asked:
            counted = "a layer counts positions by itself, and takes no position for each token"
            raise NotPageable(f"{counted}: {type(error).__name__}: {error}") from error
        # It asks the cache for what this one has not, such as recurrent states, but no layer asks for its length.
        return False
    return asked.asked
