"""What the kernels of `core::selective_state_update` take of a call alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from core_cuda.ops.recurrent.states import group_of, num_sequences, places


@dataclass(frozen=True, slots=True)
class SpaceCall:
    """The arguments of the canonical op; x, B and C each with rows of one run, bounded and query_starts in one run."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    states: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    dt_min: float
    dt_max: float
    bounded: Tensor | None
    slots: Tensor | None
    kept: Tensor | None
    query_starts: Tensor | None

    @property
    def num_sequences(self) -> int:
        """Return how many sequences it has."""
        return num_sequences(self.x.shape[0], self.query_starts)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return x, dt, A, B, C, states, D, dt_bias, bounded, slots to read and to write, query_starts."""
        given = self.x, self.dt, self.A, self.B, self.C, self.states, self.D, self.dt_bias, self.bounded
        return *given, *places(self.slots, self.kept), self.query_starts

    @property
    def sizes(self) -> dict[str, int]:
        """Return heads, those of a group, features and numbers of state."""
        heads, features = self.x.shape[1:]
        group, state = group_of(heads, self.B.shape[1]), self.B.shape[2]
        return {"HEADS": heads, "GROUP": group, "FEATURES": features, "STATE": state}

    @property
    def of_steps(self) -> dict[str, Any]:
        """Return what a step is made of."""
        return {"SOFTPLUS": self.dt_softplus, "LEAST": self.dt_min, "MOST": self.dt_max}

    @property
    def constants(self) -> dict[str, Any]:
        """Return what kernels are compiled for."""
        return {**self.sizes, **self.of_steps}


def strides_of(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """Return the strides of so many dimensions, zeros for what is not there."""
    return x.stride()[:dims] if x is not None else (0,) * dims
