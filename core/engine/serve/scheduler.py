"""Continuous batching: what each step computes, by priority and arrival; sequences join and leave between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from itertools import repeat

from core.engine.serve.waiting import WaitingSequences
from core.engine.steps.drafts import OwnText
from core.engine.steps.model_runner import SequenceCache
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part, Step

Propose = Callable[[List[tuple[Sequence, int]]], List[tuple[int, ...]]]
"""Returns drafts for each of these sequences, at most as many as are wanted of it."""
MAX_GIVEN_WAY = 3
"""How often a sequence gives its cache back to more urgent ones; after that it counts as equally urgent."""


class Scheduler:
    """Waiting and running sequences, those that wait by priority and arrival.

    A step holds one token of each sequence that is generating, and fills what is left of its token budget with prompts:
    so no prompt holds up the others, however long, and a prompt that doesn't fit is computed in chunks over several
    steps. Sequences take cache as they grow. Where it runs out, the least urgent sequence (among equals, the last to
    join) gives its cache back, returns to its place in the queue, and is computed again. Nobody starves: the first of
    the most urgent sequences never gives way; a sequence that has given way `MAX_GIVEN_WAY` times counts as most
    urgent; and the longest waiting one joins by the rule of `WaitingSequences`.
    """

    def __init__(
        self,
        cache: SequenceCache,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        mixed_step_tokens: int | None = None,
        num_drafts: int = 0,
        propose: Propose | None = None,
        whole_prompts: bool = False,
    ) -> None:
        """Schedule at most max_num_seqs sequences at once and max_step_tokens tokens per step that holds prompts.

        cache: has room for any one sequence. max_step_tokens: at least max_num_seqs. mixed_step_tokens: tokens of
        prompts at most in a step in which others generate; None sets no limit of its own. num_drafts: tokens drafted at
        most per sequence in steps without prompts. propose: where they come from; None takes them from the sequence's
        text. whole_prompts: whether a prompt of at most max_step_tokens is never cut, for models to which a later chunk
        is dear: it waits for a step in which it is the first.
        """
        assert max_step_tokens >= max_num_seqs
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._mixed_step_tokens = mixed_step_tokens or max_step_tokens
        self._num_drafts = num_drafts
        self._whole_prompts = whole_prompts
        self._propose = propose or OwnText().propose
        self._waiting = WaitingSequences()
        self._running: list[Sequence] = []
        #: Sequences that gave their cache back while their last token was still being computed.
        self._emptied: list[Sequence] = []
        #: All that were added and not removed.
        self._known: dict[int, Sequence] = {}
        #: Sequences that gave their cache back, counted each time.
        self.num_preempted = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have no cache."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold cache."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all of the same priority."""
        self._known[sequence.index] = sequence
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and take its cache back."""
        if sequence in self._running:
            self._running.remove(sequence)
        self._waiting.remove(sequence)
        if sequence in self._emptied:
            self._emptied.remove(sequence)
        self._cache.release(sequence)
        self._known.pop(sequence.index, None)

    def take_back(self, steps: Iterable[Step]) -> None:
        """Reset all sequences to before these steps, which failed; where states are lost, to their beginning.

        A sequence that gave its cache back meanwhile (its last token was under way) waits for cache again.
        """
        parts = [part for step in steps for part in step.parts]
        for part in parts:
            part.undone()
        if self._cache.keeps_states:
            lost = {part.sequence.index for part in parts}
            for sequence in [each for each in reversed(self._running) if each.index in lost]:
                self._preempt(sequence)
        emptied, self._emptied = self._emptied, []
        for sequence in reversed(emptied):
            if sequence in self._running:
                self._preempt(sequence)
        # Those whose last token was under way run again, and others have taken their places.
        while len(active := self._active()) > self._max_num_seqs:
            self._preempt(_least_urgent_first(active)[0])
        for sequence in self._known.values():
            waits = sequence in self._waiting
            if waits == (sequence in self._running) or (waits and sequence.tables):  # interrupted as it joined or left
                self._preempt(sequence)

    def schedule(self) -> Step | None:
        """Let sequences join and return what the next step computes; None where there is nothing to do.

        Sequences whose last token is under way are left out. Only what has joined or given its cache back is changed: a
        step that failed is scheduled again by the next call.
        """
        while True:
            step = self._schedule()
            if step is not None or not (active := self._active()):
                return step
            # Every running sequence has some cache, but none has enough to continue: all compute prompts.
            count = self._share(active[0], self._max_step_tokens, first=True)
            self._make_room([(active[0], active[0].num_computed + count)])

    def grow(self, step: Step, times: int) -> int:
        """Give the sequences of a step of one token each the cache to run it so many times; return how often they can,
        at least once, without any cache of others."""
        while times > 1 and not all(self._cache.grow(part.sequence, part.end + times - 1) for part in step.parts):
            times //= 2
        return times

    def _schedule(self) -> Step | None:
        preempted = self.num_preempted
        generating = self._generating()
        room = self._max_step_tokens - len(generating)
        room = min(room, self._mixed_step_tokens) if generating else room
        all_generate = len(generating) == len(self._running) and self._waiting.first() is None
        prompts = [] if all_generate else self._prompts(room, may_join=preempted == self.num_preempted)
        if prompts:
            return Step("prefill", (*(Part(sequence, 1) for sequence in generating), *prompts))
        parts = tuple(map(Part, generating, repeat(1), self._drafts(generating)))
        return Step("verify" if any(part.drafts for part in parts) else "decode", parts) if parts else None

    def _active(self) -> list[Sequence]:
        return [sequence for sequence in self._running if not sequence.has_all]

    def _generating(self) -> list[Sequence]:
        """Return the generating sequences with room for one more token, after others gave their cache back."""
        found = [sequence for sequence in self._active() if not sequence.in_prompt]
        if not all(self._cache.grow(sequence, sequence.num_computed + 1) for sequence in found):
            gone = self._make_room([(sequence, sequence.num_computed + 1) for sequence in found])
            found = [sequence for sequence in found if sequence not in gone]
            for sequence in found:
                self._cache.grow(sequence, sequence.num_computed + 1)
        return found

    def _make_room(self, wanted: List[tuple[Sequence, int]]) -> List[Sequence]:
        """Let sequences give their cache back until the others of `wanted` have room for so many tokens; return those.

        First what was taken beyond the tokens that there are, then of sequences whose last token is under way; then the
        least urgent ones give theirs, and of these none that need not.
        """
        for sequence in self._running:
            self._cache.trim(sequence)
        if not self._cache.fits(wanted):
            done = [sequence for sequence in self._running if sequence.has_all and sequence.tables]
            for sequence in done:
                self._cache.release(sequence)
            self._emptied += done

        def fits(gone: List[Sequence]) -> bool:
            return self._cache.fits([each for each in wanted if each[0] not in gone], without=gone)

        order, gone = _least_urgent_first(self._active()), list[Sequence]()
        while not fits(gone):
            gone.append(order[len(gone)])
        for sequence in reversed(gone):
            if fits(fewer := [each for each in gone if each is not sequence]):
                gone = fewer
        for sequence in gone:
            self._preempt(sequence)
        return gone

    def _preempt(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        self._cache.release(sequence)
        sequence.num_computed = sequence.num_settled = sequence.num_reused = 0
        sequence.num_preemptions += 1
        self.num_preempted += 1
        if sequence not in self._waiting:
            self._waiting.add(sequence)

    def _prompts(self, room: int, *, may_join: bool) -> list[Part]:
        """Give `room` tokens to the prompts that run already, then to those that can join."""
        parts: list[Part] = []
        active = self._active()
        for sequence in [sequence for sequence in active if sequence.in_prompt]:
            count = self._share(sequence, room, first=not parts)
            if not count or not self._cache.grow(sequence, sequence.num_computed + count):
                return parts
            parts.append(Part(sequence, count))
            room -= count
        places = self._max_num_seqs - len(active)
        while may_join and room > 0 and places > 0 and (new := self._joining()) is not None:
            self._running.append(new)
            places -= 1
            count = self._share(new, room, first=not parts)
            if not count or not self._cache.grow(new, new.num_computed + count):
                return parts
            parts.append(Part(new, count))
            room -= count
        return parts

    def _share(self, sequence: Sequence, room: int, *, first: bool) -> int:
        """Return how many of a prompt's tokens are computed in a step that has room for so many more."""
        pending = sequence.num_pending
        if not self._whole_prompts or pending <= room:
            return max(0, min(room, pending))
        return min(pending, self._max_step_tokens) if first and room > 0 else 0

    def _joining(self) -> Sequence | None:
        """Give cache to the next waiting sequence and return it; None if none waits or there is no room."""
        sequence = self._waiting.first()
        if sequence is None or not self._cache.join(sequence):
            return None
        self._waiting.joined(sequence)
        if not sequence.num_preemptions:  # who joins again finds what it has computed itself
            sequence.num_cached = sequence.num_reused
        return sequence

    def _drafts(self, generating: List[Sequence]) -> List[tuple[int, ...]]:
        if not self._num_drafts:
            return [()] * len(generating)
        return self._propose([(sequence, self._num_wanted(sequence)) for sequence in generating])

    def _num_wanted(self, sequence: Sequence) -> int:
        """Return how many drafts a sequence may have, and take cache for them."""
        # The step itself gives one token more, and no token may lie beyond what may be generated.
        count = min(self._num_drafts, sequence.num_left - 1)
        return count if count > 0 and self._cache.grow(sequence, sequence.num_computed + 1 + count) else 0


def _least_urgent_first(running: list[Sequence]) -> list[Sequence]:
    """Return the sequences in the order in which they give their cache back: by the largest priority number, and among
    equals by who joined last."""
    most = min((sequence.params.priority for sequence in running), default=0)

    def rank(place: int) -> tuple[int, int]:
        sequence = running[place]
        return most if sequence.num_preemptions >= MAX_GIVEN_WAY else sequence.params.priority, place

    return [running[place] for place in sorted(range(len(running)), key=rank, reverse=True)]
