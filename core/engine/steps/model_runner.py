"""`ModelRunner`: the interface between the engine and a loaded model, on either cache or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from core.compilation.program import Program
    from core.compilation.report import ProgramReport
    from core.engine.inspect.cache_codes import Rounding
    from core.engine.lora.memory import AdapterMemory
    from core.engine.steps.sequence import Sequence as EngineSequence
    from core.engine.steps.step import Flight, Step, StepOutput


class SequenceCache(Protocol):
    """Manages the room of sequences in the key/value cache."""

    #: Whether it holds states that a step moves on: what a failed step has done to them can't be undone, so the step's
    #: sequences are computed again from their first token.
    keeps_states: bool

    def join(self, sequence: EngineSequence) -> bool:
        """Take room for all tokens that a sequence has; False, and nothing done, where there is none at present.

        Sets `num_computed`, `num_settled` and `num_reused` to what the cache holds of it already.
        """

    def grow(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """Make room for a sequence's first num_tokens tokens; False, with nothing changed, if there is none."""

    def fits(self, wanted: Sequence[tuple[EngineSequence, int]], *, without: Sequence[EngineSequence] = ()) -> bool:
        """Tell whether there is room for so many first tokens of each of these sequences, which hold room, at once.

        without: sequences that would give all of theirs back for it.
        """

    def trim(self, sequence: EngineSequence) -> None:
        """Take back room beyond the tokens that a sequence has, as is taken for drafts and steps in a row."""

    def settle(self, sequence: EngineSequence) -> None:
        """Take note of the sequence's `num_settled`, which has grown."""

    def release(self, sequence: EngineSequence) -> None:
        """Take back all room of a sequence; of one that has none, do nothing."""

    def forget(self) -> None:
        """Use nothing of what was computed so far for sequences that join later."""


class ModelRunner(Protocol):
    """Computes steps and owns the cache."""

    #: Which cache: "paged" or "static", or "recompute" for none.
    route: str
    #: Why that cache.
    reason: str
    max_num_seqs: int
    #: Tokens at most in a step that holds prompts.
    max_step_tokens: int
    #: Whether a later chunk of a prompt takes much longer than the same tokens in one with those before.
    whole_prompts: bool
    #: Drafts at most behind a pending token.
    num_drafts: int
    #: How the model's own forward gets a cache of the same codes; None where the cache holds no codes.
    cache_rounding: Rounding | None
    #: The room for adapters; None without.
    adapters: AdapterMemory | None

    @property
    def cache(self) -> SequenceCache:
        """The room of sequences in the cache."""

    @property
    def program(self) -> Program:
        """The compiled model."""

    def run(self, step: Step, behind: Flight | None = None) -> StepOutput | None:
        """Compute a step; it changes the cache only, and only where these tokens belong.

        behind: the step that is under way and gives the tokens which this one begins with. None, with nothing done,
        where that can't be; never without `behind`.
        """

    def repeats(self, step: Step) -> bool:
        """Tell whether `run` takes a step of decode with `Step.times` above 1."""

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""

    def close(self) -> None:
        """Free graphs and cache and leave the model as it was."""
