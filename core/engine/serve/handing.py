"""Hands what a step gave to its requests: each gets its part once, whatever interrupts this in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from core.engine.steps.speculation import accept

if TYPE_CHECKING:
    from torch import Tensor

    from core.engine.serve.request import Completion, Request, RequestOutput
    from core.engine.serve.scheduler import Scheduler
    from core.engine.serve.stats import EngineStats
    from core.engine.steps.drafts import Drafter
    from core.engine.steps.model_runner import ModelRunner
    from core.engine.steps.sequence import Sequence as EngineSequence
    from core.engine.steps.step import Part, Step


class Begun(NamedTuple):
    """A request that is being given its part of a step, and what it was like before."""

    #: Of the part in its step.
    number: int
    request: Request
    num_generated: int
    num_computed: int
    num_awaited: int
    #: The tokens that it had, once it is put back.
    tokens: tuple[int, ...] | None = None


@dataclass(slots=True)
class Done:
    """A step that was computed, and how far it is handed out."""

    step: Step
    #: One for each of its rows, and all rows again for each further time that it ran.
    tokens: list[int]
    #: (rows, vocabulary) on the host, where they were wanted.
    logits: Tensor | None
    #: Parts that were handed out.
    num_handed: int = 0
    #: What that gave, by the number of the part.
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    begun: Begun | None = None

    def tokens_of(self, first: int, part: Part) -> list[int]:
        """Return the tokens of a part whose rows begin at `first`: one for each row, or for each time."""
        return (
            self.tokens[first :: self.step.num_rows]
            if self.step.times > 1
            else self.tokens[first : first + part.num_rows]
        )

    def withdraw(self, request_id: int) -> Completion | None:
        """Forget the output of a request; return its completion, if that is in it."""
        found = [number for number, output in self.outputs.items() if output.request_id == request_id]
        return self.outputs.pop(found[0]).completion if found else None


class HandsOut:
    """The part of `Engine` that gives sequences their tokens, and lets them leave."""

    drafter: Drafter
    _runner: ModelRunner
    _scheduler: Scheduler
    _counts: EngineStats
    _requests: dict[int, Request]
    _collecting: set[int]
    _completions: dict[int, Completion] | None

    def _hand_out(self, done: Done) -> list[RequestOutput]:
        """Give each sequence the tokens that a step has sampled for it; go on where an interrupt or an error ended this
        before."""
        row = 0
        try:
            self._put_back(done)
            for number, part in enumerate(done.step.parts):
                first, row = row, row + part.num_rows
                if number < done.num_handed:
                    continue
                request = self._requests.get(part.sequence.index)
                if request is None:
                    self._counts.discarded += part.num_rows  # it ended while this step ran
                elif part.emits:
                    sequence = part.sequence
                    before = len(sequence.generated), sequence.num_computed, sequence.num_awaited
                    done.begun = Begun(number, request, *before)
                    rows = None if done.logits is None else done.logits[first:row]
                    done.outputs[number] = self._advance(request, part, done.tokens_of(first, part), rows)
                else:
                    self._settle(part.sequence, part.end)
                done.num_handed = number + 1
        except BaseException:
            self._put_back(done)
            raise
        return list(done.outputs.values())

    def _put_back(self, done: Done) -> None:
        """Make the request that was interrupted as it was before; does nothing where none was."""
        begun = done.begun
        if begun is None or begun.number != done.num_handed:
            return
        request, sequence = begun.request, begun.request.sequence
        if begun.tokens is None:
            begun = done.begun = begun._replace(tokens=tuple(sequence.generated[: begun.num_generated]))
        assert begun.tokens is not None
        request.rewind(begun.tokens)
        sequence.num_computed, sequence.num_awaited = begun.num_computed, begun.num_awaited
        self._requests[sequence.index] = request  # where it was leaving
        done.begun = None

    def _advance(self, request: Request, part: Part, tokens: Sequence[int], logits: Tensor | None) -> RequestOutput:
        """Give a sequence the tokens of its part of a step, up to the one that ends it."""
        sequence, num_generated = request.sequence, len(request.sequence.generated)
        sequence.num_awaited -= 1 if part.drafts else len(tokens)
        text = request.push_all(accept(part.drafts, tokens) if part.drafts else tokens, logits)
        # The last new token is computed by a later step, those before it are in the cache.
        more = len(sequence.generated) - num_generated - 1
        if part.drafts:
            sequence.num_computed += more
        self._settle(sequence, part.end + more)
        if (completion := request.completion()) is not None:
            self._leave(request, completion)
        if part.drafts:
            self._counts.accepted[self.drafter.kind] += more
        else:
            self._counts.discarded += len(tokens) - 1 - more
        return request.output(num_generated, text, completion)

    def _settle(self, sequence: EngineSequence, num_tokens: int) -> None:
        # Empty if the sequence lost its cache meanwhile.
        sequence.num_settled = min(num_tokens, sequence.num_computed, self.drafter.num_held(sequence))
        self._runner.cache.settle(sequence)

    def _leave(self, request: Request, completion: Completion) -> Completion:
        if self._completions is not None:
            self._completions[request.sequence.index] = completion
        self._scheduler.remove(request.sequence)
        self.drafter.forget(request.sequence)
        self._collecting.discard(request.sequence.index)
        # A sequence that only waited never joined.
        self._counts.ended += (
            self._requests.pop(request.sequence.index, None) is not None and request.sequence.has_begun
        )
        return completion
