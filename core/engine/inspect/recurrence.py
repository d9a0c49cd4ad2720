"""The layers of a model that keep a state of fixed size of each sequence, and what their states take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

StateKey = tuple[Literal["conv", "recurrent"], int, int]
"""A state by kind, number of the layer, and number among the layer's states of that kind."""
Accessor = tuple[str, str]
"""Names of two methods of a cache that a model brings: one returns the state of a layer, one takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """What one state of one sequence takes."""

    key: StateKey
    #: Without the batch dimension.
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of one sequence's state."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayer:
    """A module that keeps states, and how it is given the cache that holds them."""

    #: Path of the module in the model.
    path: str
    #: The parameter of its forward that takes the cache, and the place of that parameter.
    argument: str
    place: int
    states: tuple[StateSpec, ...]
    #: The least and the most that a step of its state space may be in prompts alone, 0 for no bound: transformers' code
    #: for one token knows no bound.
    step_bounds: tuple[float, float] = (0.0, 0.0)
    #: The methods by which it reads and writes recurrent states, beside transformers' own; by the states' number.
    accessors: tuple[Accessor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """The layers of a model that keep states."""

    layers: Mapping[nn.Module, RecurrentLayer]
    #: Whether several tokens may follow a state that is there: some layers read it for a single token only.
    continues: bool

    @property
    def bytes_per_sequence(self) -> int:
        """Memory of one sequence's states in all layers."""
        return sum(state.num_bytes for layer in self.layers.values() for state in layer.states)

    @property
    def bounds_steps(self) -> bool:
        """Whether any layer bounds the steps of its state space, in prompts alone."""
        return any(any(layer.step_bounds) for layer in self.layers.values())


NONE = Recurrence(layers=MappingProxyType({}), continues=True)
"""Of models that keep no state besides keys and values."""
