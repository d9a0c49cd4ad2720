"""Drafts of a second, smaller model, which computes the same sequences on a cache of its own.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), and Chen et al., Accelerating Large
Language Model Decoding with Speculative Sampling (2023). The model only proposes: which tokens a sequence gets is
decided by the served model's logits and the sequence's own numbers, as without drafts. The draft model samples by the
same parameters and the same numbers, so that it often hits what the served model will choose.

Its keys and values lie in groups of the block tables beside the served model's, so blocks come and go with the
sequence. Entries of a wrong draft lie behind the valid tokens and are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import takewhile

from core.compilation.report import ProgramReport
from core.engine.config import Phase
from core.engine.steps.model_runner import ModelRunner
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Flight, Part, Step, StepOutput

CATCH_UP = 2
"""Tokens of each sequence in a step that also computes the last draft of the round before, where all were right."""
_FAR_BEHIND = 8
"""Most tokens that a sequence without drafts may lag behind before the draft model computes them: its cache is shared,
and what lies before a window given back, only as far as both models have computed it."""


@dataclass(slots=True)
class _Follower:
    """The draft model's view of a sequence."""

    #: Its tokens, drafts included, and how many of them are in the draft model's cache.
    twin: Sequence
    #: Generated tokens that are known to be the sequence's own.
    num_right: int
    #: `Sequence.num_preemptions` when it last followed: with another count, the cache is another one.
    num_preemptions: int

    def learn(self, tokens: List[int]) -> None:
        """Append the sequence's next tokens after those known to be right; drop drafts that differ.

        At least the last token is left to be computed.
        """
        twin, right = self.twin, self.num_right
        pairs = zip(twin.generated[right:], tokens, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        twin.generated[right + same :] = tokens[same:]
        twin.num_computed = min(twin.num_computed, len(twin.prompt) + right + same, len(twin) - 1)
        self.num_right = len(twin.generated)


class DraftModel:
    """Drafts of a model for the sequences of an engine."""

    kind = "model"

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, target_vocab_size: int, catch_up: int = CATCH_UP
    ) -> None:
        """runner: of the draft model, on the served model's block tables, with `catch_up - 1` drafts of its own. It is
        closed with this.

        vocab_size, target_vocab_size: tokens that the draft model and the served one know. catch_up: tokens at most of
        each sequence in a step that drafts.
        """
        self._runner = runner
        self._catch_up = catch_up
        self._vocab_size = vocab_size
        self._target_vocab_size = target_vocab_size
        self._followers: dict[int, _Follower] = {}
        # A step that nobody waits for. Host memory of a step is written again two steps later.
        self._unread: StepOutput | None = None

    def propose(self, wanted: List[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return drafts for each sequence, at most as many as are wanted of it; it has cache blocks for them.

        The sequences lack nothing but the token sampled last.
        """
        try:
            followers = [self._follow(sequence) for sequence, _ in wanted]
            for follower in followers:
                follower.learn(())  # drafts of a step that failed
            pairs = [(f.twin, count) for f, (_, count) in zip(followers, wanted, strict=True) if count]
            if pairs:
                self._compute([(twin, len(twin) - self._catch_up) for twin, _ in pairs])
                self._draft(pairs)
        except BaseException:
            self._reset(sequence for sequence, _ in wanted)
            raise
        return [self._known(follower.twin.generated[follower.num_right :]) for follower in followers]

    def follow(self, step: Step) -> None:
        """Compute what the served model computes of prompts, and of sequences that have long had no draft."""
        parts = [(self._follow(part.sequence).twin, part) for part in step.parts]
        behind = _FAR_BEHIND if step.phase != "prefill" else 1
        ends = [(twin, self._end(part)) for twin, part in parts]
        wanted = [(twin, end) for twin, end in ends if end - twin.num_computed >= behind]
        try:
            self._compute(wanted)
        except BaseException:
            self._reset(part.sequence for part in step.parts)
            raise

    def num_held(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens are in the draft model's cache."""
        return self._follow(sequence).twin.num_computed

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence; does nothing for an unknown one."""
        self._followers.pop(sequence.index, None)

    def report(self) -> ProgramReport:
        """Return the account of the draft model's compiled program."""
        return self._runner.report()

    def wait_compiled(self, timeout_s: float | None) -> bool:
        """Wait until the draft model's graphs are compiled, as `Program.wait_compiled` does."""
        return self._runner.program.wait_compiled(timeout_s)

    def close(self) -> None:
        """Free the draft model's graphs and cache."""
        self._followers.clear()
        self._unread = None
        self._runner.close()

    def _follow(self, sequence: Sequence) -> _Follower:
        """Return a sequence's follower, taken to where the sequence stands: wrong drafts go."""
        found = self._followers.get(sequence.index)
        if found is None or found.num_preemptions != sequence.num_preemptions:
            twin = self._twin(sequence)
            twin.num_computed = sequence.num_reused  # the cache holds only tokens that both models computed
            found = _Follower(twin, len(twin.generated), sequence.num_preemptions)
            self._followers[sequence.index] = found
        found.twin.tables, found.twin.version = sequence.tables, sequence.version
        if len(sequence.generated) > found.num_right:
            found.learn([min(token, self._vocab_size - 1) for token in sequence.generated[found.num_right :]])
        return found

    def _twin(self, sequence: Sequence) -> Sequence:
        """Return what the draft model computes for a sequence."""
        return sequence.twin(self._vocab_size)

    def _end(self, part: Part) -> int:
        """Return how many of the twin's tokens may be computed once a part of the served model's step was begun."""
        return part.end

    def _draft(self, pairs: List[tuple[Sequence, int]]) -> None:
        """Append as many drafts to each sequence as are wanted; it lacks at most `catch_up` tokens in the cache.

        Each step takes the tokens of the one before on the device, where it can, and is begun before the host has them.
        """
        parts = [Part(twin, twin.num_pending) for twin, _ in pairs]
        flight = self._launch("decode" if all(part.num_tokens == 1 for part in parts) else "verify", parts)
        assert flight is not None  # a step can be refused only if it is queued behind another
        for count in range(1, max(count for _, count in pairs)):
            going_on = [twin for twin, wanted in pairs if wanted > count]
            following = self._launch("decode", [Part(twin, 1) for twin in going_on], flight)
            _take(flight)
            flight = following or self._launch("decode", [Part(twin, 1) for twin in going_on])
            assert flight is not None
        _take(flight)

    def _compute(self, wanted: List[tuple[Sequence, int]]) -> None:
        """Compute known tokens of each sequence up to a position, in steps of prompts; choose none."""
        left = [(twin, end) for twin, end in wanted if twin.num_computed < end]
        while left:
            room = self._runner.max_step_tokens
            parts: list[Part] = []
            for twin, end in left:
                count = min(room, end - twin.num_computed)
                if count:
                    parts.append(Part(twin, count))
                    parts[-1].emits = parts[-1].is_shaped = False
                    room -= count
            flight = self._launch("prefill", parts)
            assert flight is not None
            self._unread = flight.output
            left = [(twin, end) for twin, end in left if twin.num_computed < end]

    def _launch(self, phase: Phase, parts: List[Part], behind: Flight | None = None) -> Flight | None:
        """Begin a step and wait for the silent one before it; None, with nothing done, as `ModelRunner.run` says."""
        step = Step(phase, tuple(parts))
        output = self._runner.run(step, behind)
        if output is None:
            return None
        for part in parts:
            part.launched()
        unread, self._unread = self._unread, None
        if unread is not None and unread.read is not None:
            unread.read()
        return Flight(step, output)

    def _known(self, drafts: List[int]) -> tuple[int, ...]:
        """Return the drafts up to the first that the served model does not know."""
        return tuple(takewhile(lambda token: token < self._target_vocab_size, drafts))

    def _reset(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.forget(sequence)


def _take(flight: Flight) -> None:
    """Wait for a step's tokens and append them to its sequences."""
    output = flight.output
    tokens = output.tokens.tolist() if output.read is None else output.read()
    for part, token in zip(flight.step.parts, tokens, strict=True):
        part.sequence.num_awaited -= 1
        part.sequence.generated.append(token)
