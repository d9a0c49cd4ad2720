"""Drafts of a head, which reads the served model's hidden states (`core.engine.heads`).

Its sequences begin with the second token: at each place it is given a token with the hidden state of the one before. So
its keys and values lie where the served model's do, of the same length but for the token sampled last.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from core.engine.steps.draft_model import DraftModel
from core.engine.steps.model_runner import ModelRunner
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part


class DraftHead(DraftModel):
    """Drafts of a head for the sequences of an engine."""

    kind = "head"

    def __init__(self, runner: ModelRunner, *, vocab_size: int, num_drafts: int, detach: Callable[[], None]) -> None:
        """runner: of the head, as of `DraftModel`, with `num_drafts` drafts. vocab_size: of the served model as well.
        detach: takes the head off the served model."""
        super().__init__(runner, vocab_size=vocab_size, target_vocab_size=vocab_size, catch_up=1 + num_drafts)
        self._detach = detach

    def propose(self, wanted: List[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return drafts for each sequence, at most as many as are wanted of it; it has cache blocks for them."""
        drafts = super().propose(wanted)
        for sequence, _ in wanted:
            # What lies behind was computed of states that the head made itself; the next step brings the model's own.
            twin = self._follow(sequence).twin
            twin.num_computed = min(twin.num_computed, sequence.num_computed)
        return drafts

    def close(self) -> None:
        """Free the head's graphs and cache, and take it off the served model."""
        super().close()
        self._detach()

    def _twin(self, sequence: Sequence) -> Sequence:
        return sequence.twin(self._vocab_size, first=1)

    def _end(self, part: Part) -> int:
        # The token behind the last one is known once the step is done.
        return min(part.end, part.sequence.num_known - 1)
