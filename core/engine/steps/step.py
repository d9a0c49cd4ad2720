"""One step of the engine: which tokens of which sequences are computed, and the tensors a model is given for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.compilation.capture.inputs import InputSpec
from core.engine.steps.sampling import GREEDY_ROW, sampling_params_input, sampling_row
from core.engine.steps.sequence import Sequence

Phase = Literal["prefill", "decode", "verify"]
"""prefill: a step that holds tokens of any prompt. decode: exactly one token of each sequence, the one sampled last.
verify: the same with drafts behind some of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one sequence: its next `num_tokens` pending tokens, and guesses of what follows them.

    ahead: its token is the one that the step before it, still under way, will give; the host does not know it yet.
    """

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()
    ahead: bool = False

    @property
    def first_position(self) -> int:
        """Position of the first of its tokens."""
        return self.sequence.num_computed + self.ahead

    @property
    def emits(self) -> bool:
        """Whether a token is sampled: not while a part of the prompt is left for a later step."""
        return self.num_tokens == self.sequence.num_pending

    @property
    def num_rows(self) -> int:
        """How many logits are wanted: after the last pending token and after each draft."""
        return 1 + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute, drafts last; zero stands for one that is not known yet."""
        return [0] if self.ahead else [*self.sequence.pending(self.num_tokens), *self.drafts]


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of the model computes; nothing of it changes the sequences until its tokens are known.

    num_tokens: all that are computed, drafts included. num_rows: rows of logits and tokens that the step gives, part by
    part. is_random: whether any of its tokens is sampled rather than the most likely one.
    """

    phase: Phase
    parts: tuple[Part, ...]
    num_tokens: int = field(init=False)
    num_rows: int = field(init=False)
    is_random: bool = field(init=False)

    def __post_init__(self) -> None:
        # Read several times per step, of up to hundreds of parts.
        drafts = sum([len(part.drafts) for part in self.parts])
        object.__setattr__(self, "num_rows", len(self.parts) + drafts)
        object.__setattr__(self, "num_tokens", sum([part.num_tokens for part in self.parts]) + drafts)
        hot = [part for part in self.parts if not part.sequence.params.greedy]
        object.__setattr__(self, "is_random", any(part.emits for part in hot))

    def sampling_params(self, device: torch.device) -> Tensor:
        """Return how the token of each row is to be chosen, (num_rows, 4) float32; see `sampling_row`."""
        rows = [row for part in self.parts for row in _sampling_rows(part)]
        return torch.tensor(rows, dtype=torch.float32).to(device, non_blocking=True)


def write_sampling(step: Step, array: np.ndarray[Any, Any]) -> None:
    """Write `sampling_params` of a step into an array of a bucket's size; padding rows are greedy."""
    rows = [row for part in step.parts for row in _sampling_rows(part)]
    array[: len(rows)] = rows
    array[len(rows) :] = GREEDY_ROW


def _sampling_rows(part: Part) -> Iterator[tuple[float, ...]]:
    sequence, first = part.sequence, len(part.sequence.generated) + part.ahead
    for offset in range(part.num_rows):
        greedy = sequence.params.greedy or not part.emits
        yield GREEDY_ROW if greedy else sampling_row(sequence.params, sequence.uniform(first + offset))


class StepOutput(NamedTuple):
    """What a step gives, valid until the next: tokens (rows,) int64 and the logits (rows, vocabulary) they are from.

    sampled: random rows were sampled; otherwise every token is the most likely one. read: waits for the tokens and
    returns them on the host, also when the next step runs already; None where nobody sent them there.
    """

    tokens: Tensor
    logits: Tensor
    sampled: bool
    read: Callable[[], list[int]] | None = None


class Flight(NamedTuple):
    """A step that was begun, and what it gives once it is done."""

    step: Step
    output: StepOutput


def step_behind(step: Step) -> Step | None:
    """Return the decode step that follows a decode step, whatever tokens that gives; None where one will be the last.

    A sequence may still end by the token it gets; what the step behind computed for it is of no use then.
    """
    if step.phase != "decode":
        return None
    sequences = [part.sequence for part in step.parts]
    if any(len(each.generated) + 1 >= each.params.max_new_tokens for each in sequences):
        return None
    if all(part.ahead for part in step.parts):
        return step  # where its tokens stand, the sequences say
    return Step("decode", tuple([Part(each, 1, ahead=True) for each in sequences]))


def step_inputs(max_blocks: int) -> dict[str, InputSpec]:
    """Declare a step's inputs: `tokens` flattened over `seqs` sequences, at most `max_blocks` cache blocks each, and
    `rows` of logits wanted.

    Padding tokens point at the null block and belong to no sequence; padding sequences have length 0.
    """
    return {
        "input_ids": InputSpec(("tokens",), torch.int64),
        "position_ids": InputSpec(("tokens",), torch.int64),
        "slot_mapping": InputSpec(("tokens",), torch.int64),
        "block_table": InputSpec(("seqs", max_blocks), torch.int32),
        "seq_lens": InputSpec(("seqs",), torch.int32),
        "query_starts": InputSpec(("seqs + 1",), torch.int32, padding="edge"),
        "logit_rows": InputSpec(("rows",), torch.int64),
        "sampling_params": sampling_params_input("rows"),
    }


def step_tensors(step: Step, *, max_blocks: int, block_size: int, device: torch.device) -> dict[str, Tensor]:
    """Return the declared inputs of a step but `sampling_params`; each sequence's blocks must suffice for its tokens.

    Slots of drafts that turn out wrong hold keys and values of no one: they lie behind the sequence's length, which is
    all that attention reads, and are written again when the sequence gets there.
    """
    sizes = {"tokens": step.num_tokens, "seqs": len(step.parts), "rows": step.num_rows}
    declared = step_inputs(max_blocks)
    del declared["sampling_params"]
    tensors = {name: torch.zeros(spec.resolve(sizes), dtype=spec.dtype) for name, spec in declared.items()}
    write_step(step, {name: tensor.numpy() for name, tensor in tensors.items()}, block_size=block_size)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def write_step(
    step: Step,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    *,
    block_size: int,
    owners: MutableSequence[Sequence | None] | None = None,
) -> None:
    """Write the declared inputs of a step but `sampling_params` into arrays of a bucket's size, padding included.

    owners: for each row of `block_table` the sequence whose blocks it holds, None for zeros; rows that are right are
    left alone and the others noted. A sequence keeps its blocks as long as it runs.
    """
    num_seqs, num_tokens = len(step.parts), step.num_tokens
    tables = arrays["block_table"]
    _write_tables(step, tables, [None] * len(tables) if owners is None else owners)
    counts = np.array([part.num_tokens + len(part.drafts) for part in step.parts])
    firsts = np.array([part.first_position for part in step.parts])
    ends, stops = counts.cumsum(), firsts + counts
    held = np.array([len(part.sequence.blocks) for part in step.parts])
    assert (stops <= held * block_size).all()  # behind a sequence's own blocks the table names the null block
    seqs, shifts = np.arange(num_seqs), stops - ends
    if 1 < num_seqs < num_tokens:
        seqs, shifts = np.repeat(seqs, counts), np.repeat(shifts, counts)
    positions = np.arange(num_tokens) + shifts
    places = positions // block_size
    blocks = tables.reshape(-1).take(places + seqs * tables.shape[1]).astype(np.int64)
    slots = (blocks - places) * block_size + positions
    _put(arrays["position_ids"], positions)
    _put(arrays["slot_mapping"], slots)
    _write_tokens(step, arrays["input_ids"], ends)
    _put(arrays["seq_lens"], stops)
    starts = arrays["query_starts"]
    starts[0] = 0
    _put(starts[1:], ends, padding=num_tokens)
    _put(arrays["logit_rows"], _logit_rows(step, ends))


def _write_tokens(step: Step, array: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
    start = 0
    for part, end in zip(step.parts, ends.tolist(), strict=True):
        sequence, count = part.sequence, part.num_tokens
        done = sequence.num_computed - len(sequence.prompt)
        if part.ahead:
            array[start:end] = 0
        elif part.drafts or -count < done < 0:
            array[start:end] = part.tokens
        elif done >= 0:
            array[start:end] = sequence.generated[done : done + count]
        else:
            array[start:end] = sequence.prompt_ids[sequence.num_computed : sequence.num_computed + count]
        start = end
    array[start:] = 0


def _logit_rows(step: Step, ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if step.num_rows == len(step.parts):
        return ends - 1
    each = zip(ends.tolist(), step.parts, strict=True)
    return np.array([row for end, part in each for row in range(end - part.num_rows, end)])


def _put(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | list[int], padding: int = 0) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding


def _write_tables(step: Step, tables: np.ndarray[Any, Any], owners: MutableSequence[Sequence | None]) -> None:
    wanted = [*(part.sequence for part in step.parts), *[None] * (len(tables) - len(step.parts))]
    for row, sequence in enumerate(wanted):
        if owners[row] is not sequence:
            _put(tables[row], sequence.blocks if sequence else [])
            owners[row] = sequence
