"""One step of the engine: which tokens of which sequences are computed, and what that gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.engine.config import Phase, Sampling
from core.engine.steps.sampling import GREEDY_ROW, next_tokens, sampling_row
from core.engine.steps.sequence import Sequence


@dataclass(slots=True)
class Part:
    """One sequence's part of a step, from the sequence's state when the part is made."""

    sequence: Sequence
    #: How many of the sequence's pending tokens are computed.
    num_tokens: int
    #: Guesses of the tokens that follow these.
    drafts: tuple[int, ...] = ()
    #: Position of the first of its tokens.
    first_position: int = field(init=False)
    #: Whether a token is sampled: not while a part of the prompt is left for a later step.
    emits: bool = field(init=False)
    #: Whether its last token is still being computed by the step before.
    ahead: bool = field(init=False)
    #: Whether it is the first of the sequence, or the first since the sequence lost its cache.
    joins: bool = field(init=False)
    #: Whether the sequence has been sampled before and lacks nothing but that token.
    generates: bool = field(init=False)
    #: Whether the device changes the logits of its rows.
    is_shaped: bool = field(init=False)

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.first_position = first = sequence.num_computed
        end, known = first + self.num_tokens, sequence.num_known
        self.emits = end == known + sequence.num_awaited
        self.ahead = end > known
        self.generates = not sequence.in_prompt
        self.is_shaped = self.emits and sequence.shaping == "device"
        self.joins = first == sequence.num_reused and not self.generates

    @property
    def end(self) -> int:
        """Position behind its tokens, drafts left out."""
        return self.first_position + self.num_tokens

    @property
    def num_rows(self) -> int:
        """How many logits are wanted: after the last pending token and after each draft."""
        return 1 + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute, drafts last; zero stands for one that is not known yet."""
        return [*self.sequence.tokens(self.first_position, self.num_tokens), *self.drafts]

    def launched(self, times: int = 1) -> None:
        """Advance the sequence to its state after a step that runs so many times."""
        self.sequence.num_computed += self.num_tokens + times - 1
        self.sequence.num_awaited += times if self.emits else 0

    def undone(self) -> None:
        """Reset the sequence to its state before this part and all later ones."""
        self.sequence.num_computed = min(self.sequence.num_computed, self.first_position)
        self.sequence.num_noted = min(self.sequence.num_noted, self.first_position)
        self.sequence.num_awaited = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one call of the model; the sequences change only when its tokens are known."""

    phase: Phase
    parts: tuple[Part, ...]
    #: How often the graph runs, each time on the tokens of the time before: more than once for decode alone, where each
    #: part is one token.
    times: int = 1
    #: All tokens that are computed each time, drafts included.
    num_tokens: int = field(init=False)
    #: Rows of logits and tokens that the step gives each time, part by part.
    num_rows: int = field(init=False)
    #: The cheapest way to choose tokens that does what all its sequences ask of the device.
    sampling: Sampling = field(init=False)

    def __post_init__(self) -> None:
        # Read several times per step, of up to hundreds of parts.
        drafts = sum([len(part.drafts) for part in self.parts])
        object.__setattr__(self, "num_rows", len(self.parts) + drafts)
        object.__setattr__(self, "num_tokens", sum([part.num_tokens for part in self.parts]) + drafts)
        hot = [part for part in self.parts if part.is_shaped or not part.sequence.params.greedy]
        sampled = "random" if any(part.emits for part in hot) else "greedy"
        object.__setattr__(self, "sampling", "shaped" if any(part.is_shaped for part in hot) else sampled)

    @property
    def lora(self) -> bool:
        """Whether any of its sequences has an adapter."""
        return any(part.sequence.adapter for part in self.parts)

    def sampling_params(self, device: torch.device) -> Tensor:
        """Return how the token of each row is to be chosen, (num_rows, 4) float32; see `sampling_row`."""
        rows = [row for part in self.parts for row in _sampling_rows(part)]
        return torch.tensor(rows, dtype=torch.float32).to(device, non_blocking=True)


def write_sampling(step: Step, array: np.ndarray[Any, Any], time: int = 0) -> None:
    """Write `sampling_params` of a step into an array of a bucket's size; padding rows are greedy. time: which of the
    `Step.times`."""
    rows = [row for part in step.parts for row in _sampling_rows(part, time)]
    array[: len(rows)] = rows
    array[len(rows) :] = GREEDY_ROW


def _sampling_rows(part: Part, time: int = 0) -> Iterator[tuple[float, ...]]:
    sequence, first = part.sequence, part.end - len(part.sequence.prompt) + time
    for offset in range(part.num_rows):
        greedy = sequence.params.greedy or not part.emits
        yield GREEDY_ROW if greedy else sampling_row(sequence.params, sequence.uniform(first + offset))


class StepOutput(NamedTuple):
    """The result of a step, valid until the next step; of one that runs several times, of the last time."""

    #: (rows,) int64.
    tokens: Tensor
    #: The logits that the tokens were chosen from, (rows, vocabulary), or the part of them that this process has.
    logits: Tensor
    #: How the tokens were chosen.
    sampling: Sampling
    #: Whether the program itself chose them.
    captured: bool = True
    #: Padding tokens that were computed to fill the bucket.
    padding: int = 0
    #: Waits for the tokens and returns them on the host, those of each time after those of the time before, also when
    #: the next step runs already; None where they were not sent there.
    read: Callable[[], list[int]] | None = None
    #: Makes the logits whole, with all processes that share the model; None where they are.
    gather: Callable[[Tensor], Tensor] | None = None

    def all_logits(self) -> Tensor:
        """Return the logits of the whole vocabulary, which all processes ask for that share the model."""
        return self.logits if self.gather is None else self.gather(self.logits)


def sampled_by_request(step: Step, output: StepOutput) -> StepOutput:
    """Return the output with sampled tokens, where a step asks for them and its program took the most likely."""
    if step.sampling == "greedy" or output.sampling != "greedy":
        return output
    params = step.sampling_params(output.logits.device)
    return output._replace(tokens=next_tokens(output.all_logits(), params, "random"), sampling="random", captured=False)


class Flight(NamedTuple):
    """A step that was begun, and its result once it is done."""

    step: Step
    output: StepOutput


def rows_ahead(step: Step, before: Step) -> list[int]:
    """Return the rows of `before`, still under way, whose tokens `step` begins with.

    Sequences that generate come first in a step, with one token each: so these are its first tokens.
    """
    rows, row = {}, 0
    for part in before.parts:
        rows[part.sequence.index] = row
        row += part.num_rows
    found = [rows[part.sequence.index] for part in step.parts if part.ahead]
    assert all(part.ahead and part.num_tokens == 1 for part in step.parts[: len(found)])
    return found
