"""Hidden states of the tokens in the cache, by which a served model's steps reach the head that drafts for it.

Each slot of the cache has a row. The model writes the rows of the tokens that it computes, within its captured step,
and the head reads them within its own, whenever it gets to these tokens. So nothing of a step has to be kept for the
head, and neither chunks of prompts nor steps without drafts lose a row. Addresses never change.

Legend of shapes: T tokens of a step, R rows of logits, S slots of the cache, H hidden size.
"""

from __future__ import annotations

from torch import Tensor

from core.compilation.capture.breaks import Held


class HiddenStates:
    """The rows, and which of them the step that runs has to do with.

    A row belongs to the token whose slot it is. Behind the last token that the model has computed, it holds what the
    head takes for that state, until the model computes the token.
    """

    def __init__(self, rows: Tensor) -> None:
        """rows: (S, H); those of the null block take what belongs nowhere."""
        self.rows = rows
        #: Of the tokens of the step that runs, (T,) int64; None between steps.
        self.slots: Tensor | None = None
        #: Of the tokens behind each of its rows of logits, (R,) int64; None in steps of the served model.
        self.next_slots: Tensor | None = None

    @property
    def held(self) -> tuple[Held, ...]:
        """What is set for the time of a step."""
        return (self, "slots"), (self, "next_slots")

    def write(self, states: Tensor) -> None:
        """Keep the states (T, H) of the step's tokens; between steps, do nothing."""
        if self.slots is not None:
            self.rows.index_copy_(0, self.slots, states.to(self.rows.dtype))

    def read(self) -> Tensor | None:
        """Return the states (T, H) of the step's tokens; None between steps."""
        return None if self.slots is None else self.rows[self.slots]

    def guess(self, states: Tensor) -> None:
        """Keep states (R, H) for the tokens behind the step's rows of logits; between steps, do nothing."""
        if self.next_slots is not None:
            self.rows.index_copy_(0, self.next_slots, states)

    def clear(self) -> None:
        """Forget the step."""
        self.slots = self.next_slots = None
