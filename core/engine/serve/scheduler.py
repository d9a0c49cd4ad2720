"""Continuous batching: what each step computes, first come first served; sequences join and leave between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part, Step


class Scheduler:
    """Waiting and running sequences, in the order of their arrival.

    A step holds one token of each sequence that is generating, and fills what is left of its token budget with prompts:
    so no prompt holds up the others, however long, and a prompt that doesn't fit is computed in chunks over several
    steps. Nobody starves: all that generate are in every step, and prompts are served in order, the first one first.
    """

    def __init__(
        self,
        admit: Callable[[Sequence], bool],
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        num_drafts: int = 0,
    ) -> None:
        """Schedule at most max_num_seqs sequences at once and max_step_tokens tokens per step that holds prompts.

        admit: reserves the cache of a whole sequence, or returns False where there is no room at present; so a running
        sequence never lacks any. max_step_tokens: at least max_num_seqs. num_drafts: tokens drafted at most per
        sequence in steps without prompts.
        """
        assert max_step_tokens >= max_num_seqs
        self._admit = admit
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._num_drafts = num_drafts
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that have no cache yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold cache."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running; the caller releases its cache."""
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def schedule(self) -> Step | None:
        """Let sequences join and return what the next step computes; None where there is nothing to do.

        Only what has joined is changed: a step that failed is scheduled again by the next call.
        """
        generating = [sequence for sequence in self._running if not sequence.in_prompt]
        prompts = self._prompts(self._max_step_tokens - len(generating))
        if prompts:
            return Step("prefill", (*(Part(sequence, 1) for sequence in generating), *prompts))
        parts = tuple(Part(sequence, 1, self._drafts(sequence)) for sequence in generating)
        return Step("verify" if any(part.drafts for part in parts) else "decode", parts) if parts else None

    def _prompts(self, room: int) -> list[Part]:
        """Give `room` tokens to the prompts that run already, then to those that can join."""
        parts = []
        for sequence in [sequence for sequence in self._running if sequence.in_prompt]:
            parts.append(Part(sequence, min(room, sequence.num_pending)))
            room -= parts[-1].num_tokens
            if not room:
                return parts
        while room and self._waiting and len(self._running) < self._max_num_seqs and self._admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            parts.append(Part(sequence, min(room, sequence.num_pending)))
            room -= parts[-1].num_tokens
        return parts

    def _drafts(self, sequence: Sequence) -> tuple[int, ...]:
        # The step itself gives one token more, and no token may lie beyond what was reserved.
        room = sequence.params.max_new_tokens - len(sequence.generated) - 1
        count = min(self._num_drafts, room)
        return tuple(sequence.ngrams.propose(sequence.prompt + sequence.generated, count)) if count > 0 else ()
