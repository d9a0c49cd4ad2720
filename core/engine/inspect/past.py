"""What layers ask of transformers' cache besides keys and values, and the stand-in that answers on the paged route.

A step holds tokens of several sequences one after the other, so no one number of tokens came before all of them: a
layer that counts positions by itself (Llama 4's temperature) needs the position of each. And a layer that chooses the
positions to attend to by scores of its own (the indexer of DeepSeek V3.2) keeps keys for these scores in the cache.

Legend of shapes: T tokens of a step, B sequences, N blocks of P positions, M blocks of a sequence at most, S = M * P,
D features of an indexer's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.indexing import checked_indices
from core.engine.inspect.attention import SIZE, NotPageable, StepTensors, implementation, register_interfaces
from core.engine.models.forward import accepted_arguments

_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The keys that one layer chooses positions by: one of each position, for all its heads."""

    size: int
    dtype: torch.dtype

    @property
    def bytes_per_position(self) -> int:
        """Cache memory of one position."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a model's layers ask of the cache."""

    #: Whether a layer asks how many tokens came before.
    positions: bool = False
    #: By the number of the layer.
    indexers: Mapping[int, Indexer] = field(default_factory=dict)


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


class IndexedPositions(TokenPositions):
    """The stand-in that keeps the keys of indexers too, in blocks beside those of keys and values."""

    def __init__(self, position_ids: Tensor, step: StepTensors, caches: Mapping[int, Tensor]) -> None:
        """step: of the layers that see all positions. caches: (N, P, D) by layer."""
        super().__init__(position_ids)
        assert step.query_starts is not None and step.block_table is not None and step.slot_mapping is not None
        tokens = torch.arange(position_ids.shape[0], device=position_ids.device)
        sequence = torch.bucketize(tokens, step.query_starts[1:], right=True).clamp(max=step.block_table.shape[0] - 1)
        self._tables = step.block_table[sequence].long()  # (T, M)
        self._slots, self._caches = step.slot_mapping, caches

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Keep the step's keys (1, T, D) and return those of each token's own sequence, (1, T, S, D).

        For keys of one sequence, (1, S, D), a layer computes a token's scores by a product over a dimension put in for
        the tokens. Here that dimension is there already, and the one put in stands before it, for all tokens at once.
        """
        cache = self._caches[layer_idx]
        cache.flatten(0, 1).index_copy_(0, self._slots, indexer_key_states[0])
        return cache[self._tables].flatten(1, 2)[None]


def visible(position_ids: Tensor, num_positions: int) -> Tensor:
    """Return which positions of its sequence each token sees, (1, 1, T, num_positions) bool."""
    return (torch.arange(num_positions, device=position_ids.device) <= position_ids[:, None])[None, None]


class _Asking(TokenPositions):
    """Notes what layers ask."""

    def __init__(self, position_ids: Tensor) -> None:
        super().__init__(position_ids)
        self.positions = False
        self.indexers: dict[int, Indexer] = {}

    def get_seq_length(self, layer_idx: int | None = None) -> Tensor:
        # The model as a whole asks for no layer, to count positions where it was given none.
        self.positions |= layer_idx is not None
        return super().get_seq_length(layer_idx)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        batch, tokens, size = indexer_key_states.shape
        if layer_idx in self.indexers or (batch, tokens) != (1, _TOKENS):
            raise NotPageable(
                f"the indexer of layer {layer_idx} keeps {tuple(indexer_key_states.shape)}, not a row each"
            )
        self.indexers[layer_idx] = Indexer(size=size, dtype=indexer_key_states.dtype)
        return indexer_key_states


@checked_indices()
def what_layers_ask(model: Any) -> Asked:
    """Return what layers ask of transformers' cache besides their own keys and values.

    Runs the model on a few tokens, with masks where it needs one. Raises `NotPageable` where a layer asks for positions
    and takes no tensor for them.
    """
    if "past_key_values" not in accepted_arguments(model):
        return Asked()
    register_interfaces()
    positions = torch.arange(_TOKENS, device=next(model.parameters()).device)
    for masks in ({}, {"attention_mask": visible(positions, _TOKENS)}):
        asking = _Asking(positions)
        given = {"input_ids": positions[None], "position_ids": positions[None], "past_key_values": asking, **masks}
        try:
            with torch.no_grad(), implementation(model, SIZE):
                model(use_cache=False, **given)
        except NotPageable:
            raise
        except Exception as error:
            if asking.positions:
                counted = "a layer counts positions by itself, and takes no position for each token"
                raise NotPageable(f"{counted}: {type(error).__name__}: {error}") from error
            # It asks the cache for what this one has not, such as recurrent states, or needs a mask.
            continue
        return Asked(positions=asking.positions, indexers=asking.indexers)
    return Asked()
