"""Where drafts come from: the sequence's own text, a model (`core.engine.steps.draft_model`), or a head
(`core.engine.steps.draft_head`)."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from core.compilation.report import ProgramReport
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Step


class Drafter(Protocol):
    """Guesses what comes next. A wrong guess costs time and changes no token."""

    #: "ngram", "model" or "head": by which `EngineStats` counts.
    kind: str

    def propose(self, wanted: List[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return drafts for each of these sequences, at most as many as are wanted of it."""

    def follow(self, step: Step) -> None:
        """Note that a step was begun."""

    def num_held(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens are in its cache: no more is shared, nor given back unseen."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence."""

    def report(self) -> ProgramReport | None:
        """Return the report of its compiled program; None without one."""

    def wait_compiled(self, timeout_s: float | None) -> bool:
        """Wait until its graphs are compiled, as `Program.wait_compiled` does."""

    def close(self) -> None:
        """Free its memory."""


class OwnText:
    """Drafts from what each sequence said before (`core.engine.steps.speculation`)."""

    kind = "ngram"

    def propose(self, wanted: List[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return for each sequence what followed the end of its text before."""
        return [
            tuple(each.ngrams.propose(each.prompt + each.generated, count)) if count else () for each, count in wanted
        ]

    def follow(self, step: Step) -> None:
        """Do nothing."""

    def num_held(self, sequence: Sequence) -> int:
        """Return all of them: there is no second cache."""
        return sequence.num_computed

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: a sequence keeps its own n-grams."""

    def report(self) -> None:
        """Return None."""

    def wait_compiled(self, timeout_s: float | None) -> bool:
        """Return at once: it has no graphs."""
        return True

    def close(self) -> None:
        """Do nothing."""
