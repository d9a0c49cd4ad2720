"""Tells the modules of a model that count positions themselves those of the step's tokens.

Legend of shapes: B sequences of a step (1 where its tokens are packed), T tokens of each, D the size of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn import functional

from core.compilation.capture.breaks import Held
from core.engine.inspect.positions import Counting, Lookup, Rows

_LOOKUP = "_core_lookup"


@dataclass(slots=True, eq=False)
class StepPositions:
    """The tokens of the step that runs: positions from 0 in each sequence, and ids, (B, T) each; else None."""

    positions: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(slots=True, eq=False)
class ServedLookup:
    """What a module's stand-in reads."""

    lookup: Lookup
    #: Shared by all modules.
    step: StepPositions

    def __deepcopy__(self, memo: object) -> ServedLookup:
        """Stay with the original: a copied model is told the same steps."""
        return self


class ServedPositions:
    """How a model is given the positions of a step: as an argument, or through modules that it is attached to."""

    def __init__(self, counting: Counting) -> None:
        """Attach nothing yet."""
        self._modules = counting.lookups
        self._given = counting.given
        self._step = StepPositions()

    def attach(self) -> None:
        """Have the modules look up what a step says."""
        for module, lookup in self._modules.items():
            object.__setattr__(module, _LOOKUP, ServedLookup(lookup, self._step))
            object.__setattr__(module, "forward", MethodType(_forward, module))

    def detach(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            for name in (_LOOKUP, "forward"):
                module.__dict__.pop(name, None)

    @property
    def held(self) -> tuple[Held, ...]:
        """What is set for the time of a step."""
        return (self._step, "positions"), (self._step, "tokens")

    def begin(self, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Begin a step, until `clear`; return the arguments of the model that tell positions.

        positions, tokens: as in `StepPositions`.
        """
        self._step.positions, self._step.tokens = positions, tokens
        given: Rows | None = self._given
        return {} if given is None else {"position_ids": given.of(positions, tokens)}

    def clear(self) -> None:
        """Forget the step."""
        self._step.positions = self._step.tokens = None

    @contextmanager
    def alone(self, tokens: Tensor) -> Iterator[dict[str, Tensor]]:
        """Attach for one call of the model with every token at position 0. tokens: (B, T)."""
        self.attach()
        try:
            yield self.begin(tokens.new_zeros(tokens.shape), tokens)
        finally:
            self.clear()
            self.detach()


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a module's forward; outside of a step it is the module's own."""
    served: ServedLookup = module._core_lookup
    step, lookup = served.step, served.lookup
    if step.positions is None or step.tokens is None:
        return type(module).forward(module, *args, **kwargs)
    rows = functional.embedding(lookup.rows.of(step.positions, step.tokens), getattr(module, lookup.table))
    return rows if lookup.batched or rows.shape[0] > 1 else rows[0]
