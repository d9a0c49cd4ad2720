"""The states that a recurrent layer is given in one step: of a batch of tokens, or of runs of tokens.

Legend of shapes: N slots, S sequences of a step, T its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.common.ops.recurrent import tokens
from core.engine.inspect.recurrence import Accessor, StateKey
from core.engine.paged.blocks import DROPPED_SLOT
from core.engine.steps.sequence import NULL_SLOT


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a step that a module computes at once: one of each of several sequences, or several of one."""

    #: Their places among the step's tokens.
    rows: slice | Tensor
    #: (S,) int64: the slots of their sequences.
    slots: Tensor
    #: Whether the sequence begins here, without any state.
    begins: bool


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The states of a batch of sequences, one token or one run of each: (S, …)."""

    #: (S,) int64: `NULL_SLOT` for padding.
    slots: Tensor

    @property
    def num_rows(self) -> int:
        """How many states there are."""
        return self.slots.shape[0]

    @property
    def kept(self) -> Tensor:
        """Where the new states go, (S,) int64: those of padding into a slot that nobody reads."""
        return self.slots.clamp(min=DROPPED_SLOT)

    def taken(self, pool: Tensor, least: float = 0.0, most: float = 0.0) -> Tensor:
        """Return the states out of those of all slots. least, most: of steps in prompts, which the module's own code
        bounds or, for one token, does not."""
        return pool.index_select(0, self.slots)

    def put(self, pool: Tensor, kept: Tensor, new: Tensor) -> None:
        """Write the new states."""
        pool.index_copy_(0, kept, new)


@dataclass(frozen=True, slots=True)
class TokenStates:
    """The states before each token of packed sequences, (T, …), in a step that is traced."""

    #: (S,) int64, `NULL_SLOT` for sequences that begin and for padding.
    slots: Tensor
    #: (S,) int64.
    kept: Tensor
    #: (S + 1,) int32.
    query_starts: Tensor
    #: (T,) bool: the tokens of prompts, which the model's code for prompts would compute.
    in_prompt: Tensor

    @classmethod
    def of(cls, slots: Tensor, seq_lens: Tensor, query_starts: Tensor, in_prompt: Tensor) -> TokenStates:
        """Return those of a step; its inputs as `step_inputs` declares them."""
        continues = seq_lens > query_starts[1:] - query_starts[:-1]
        return cls(torch.where(continues, slots, NULL_SLOT), slots.clamp(min=DROPPED_SLOT), query_starts, in_prompt)

    @property
    def num_rows(self) -> int:
        """How many tokens there are."""
        return self.in_prompt.shape[0]

    def taken(self, pool: Tensor, least: float = 0.0, most: float = 0.0) -> Tensor:
        """State the states before each token. least, most: of a step in prompts, 0 for no bound."""
        bounds = (self.in_prompt, least, most) if least or most else ()
        stated: Tensor = tokens.READ(pool, self.slots, self.query_starts, self.num_rows, *bounds)
        return stated

    def put(self, pool: Tensor, kept: Tensor, new: Tensor) -> None:
        """State that these are the states after each token."""
        tokens.WRITTEN(pool, new, kept, self.query_starts)


@dataclass(slots=True)
class RecurrentStep:
    """The step being run, shared by all layers: a batch of single tokens, or runs."""

    batch: SlotStates | TokenStates | None = None
    runs: tuple[Run, ...] | None = None
    #: The places of the step's tokens among those of its runs, (T,) int64; None where they are in that order.
    order: Tensor | None = None


class StepCache:
    """What a module gets for transformers' cache: the states of the sequences that it computes, by the same methods."""

    def __init__(self, states: dict[StateKey, Tensor | None], widths: Mapping[StateKey, int]) -> None:
        """states: (S, …) each, None for sequences that begin; changed in place. widths: of windows of convolutions."""
        self.states = states
        self._widths = widths

    @property
    def layers(self) -> StepLayers:
        """What layers of transformers before 5.21 read states of."""
        return StepLayers(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Tell whether the sequences have states, of a layer or of any, as layers of transformers before 5.21 ask."""
        return all(
            state is not None
            for (_, layer, number), state in self.states.items()
            if layer_idx in (None, layer) and state_idx in (None, number)
        )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, (S, channels, width); None where the sequence begins."""
        return self.states.get(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, (S, …); None where the sequence begins."""
        return self.states.get(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution, and return all of them: those before, then the new ones."""
        key: StateKey = ("conv", layer_idx, state_idx)
        before, width = self.states.get(key), self._widths[key]
        full = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        if full.shape[-1] < width:
            full = nn.functional.pad(full, (width - full.shape[-1], 0))
        self.states[key] = full[..., -width:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep a recurrent state, and return it."""
        self.states["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: earlier states are not kept."""
        return False


@functools.cache
def step_cache_class(accessors: tuple[Accessor, ...]) -> type[StepCache]:
    """Return the class of a `StepCache` that has these methods as well, for a model that brings a cache of its own."""
    methods: dict[str, Any] = {}
    for number, (reads, writes) in enumerate(accessors):
        methods |= {reads: _reading(number), writes: _writing(number)}
    return type("OwnStepCache", (StepCache,), methods) if methods else StepCache


def _reading(number: int) -> Any:
    def get(self: StepCache, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx, number)

    return get


def _writing(number: int) -> Any:
    def put(self: StepCache, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx, number)

    return put


class StepLayers:
    """A `StepCache` by layer."""

    def __init__(self, cache: StepCache) -> None:
        self._cache = cache

    def __getitem__(self, layer_idx: int) -> StepLayer:
        return StepLayer(self._cache, layer_idx)


class StepLayer:
    """One layer of a `StepCache`, with the attributes of a cache's layer of transformers."""

    #: Earlier states are not kept.
    record_past = False

    def __init__(self, cache: StepCache, layer_idx: int) -> None:
        kinds: dict[str, dict[int, Tensor | None]] = {"conv": {}, "recurrent": {}}
        for (kind, layer, number), state in cache.states.items():
            if layer == layer_idx:
                kinds[kind][number] = state
        self.conv_states, self.recurrent_states = kinds["conv"], kinds["recurrent"]
