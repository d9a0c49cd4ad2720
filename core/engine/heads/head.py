"""What a head is to the engine: a causal model over the tokens behind the first one, with a hidden state beside each.

Li et al., EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (2024); DeepSeek-AI, DeepSeek-V3
Technical Report (2024), section 2.2. At place i a head is given token i + 1 and the served model's hidden state after
token i, and gives logits for token i + 2 and a state that stands for the one after token i + 1.

Legend of shapes: T tokens of a step, R rows of logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.engine.heads.states import HiddenStates

Write = Callable[[Tensor], None]


@dataclass(slots=True)
class HeadOutput:
    """As a transformers model's output is read."""

    #: (1, R, V).
    logits: Tensor


class Head(nn.Module):
    """A head, as the engine runs models: by token ids and positions, with transformers' attention interface.

    Within a step of the engine it takes the hidden states from `states`. Elsewhere they are ones, which is enough to
    inspect its attention and to compare its layers on two caches.
    """

    #: Where a step of the engine finds hidden states, and leaves those for the next.
    states: HiddenStates | None = None

    def __init__(self, config: Any, embedding: nn.Module) -> None:
        """config: of its layers, which keep it and look up their attention in it. embedding: of token ids."""
        super().__init__()
        self._handles: list[RemovableHandle] = []
        self.config = config
        self.embedding = embedding

    @property
    def state_size(self) -> int:
        """H of the states that it reads."""
        return int(self.config.hidden_size)

    @abstractmethod
    def compute(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the logits are made of, and the states for what follows, both (1, T, H).

        embedded, states: (1, T, H), of each token and of the one before it. positions: (1, T) int64, of the latter.
        """

    @abstractmethod
    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits (1, R, V) of (1, R, H)."""

    def listen(self, model: Any, write: Write) -> list[RemovableHandle]:
        """See that each forward of the served model calls `write` with the states (T, H) that the head reads."""

        def forward_hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            write(output.last_hidden_state[0])

        return [model.get_decoder().register_forward_hook(forward_hook)]

    def attach(self, model: Any, states: HiddenStates) -> None:
        """Read states there from now on, and see that the served model writes them."""
        self.states = states
        self._handles = self.listen(model, states.write)

    def detach(self) -> None:
        """Leave the served model as it was; the second time, do nothing."""
        self.states = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> HeadOutput:
        """Return the logits at the places of logits_to_keep, all of them for 0. input_ids, position_ids: (1, T)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        embedded = self.embedding(input_ids)
        given = None if self.states is None else self.states.read()
        states = torch.ones_like(embedded) if given is None else given[None]
        hidden, following = self.compute(embedded, states, position_ids)
        rows = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        if self.states is not None:
            self.states.guess(following[0, rows])
        return HeadOutput(self.project(hidden[:, rows]))

    def get_input_embeddings(self) -> nn.Module:
        """Return what embeds token ids."""
        return self.embedding

    def set_attn_implementation(self, name: str) -> None:
        """Choose an attention of transformers' interface by name."""
        self.config._attn_implementation = name

    def _can_set_attn_implementation(self) -> bool:
        # A layer that does not look it up is found when the head is inspected.
        return True
