"""One step of the engine: which tokens of which sequences are computed, and the tensors a model is given for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.compilation.capture.inputs import InputSpec
from core.engine.config import Phase, Sampling
from core.engine.steps.sampling import GREEDY_ROW, next_tokens, sampling_params_input, sampling_row
from core.engine.steps.sequence import Sequence

FIRST_GROUP = slice(0, 1)
"""The tables of a model whose layers form one group, and that has the sequences to itself."""


@dataclass(slots=True)
class Part:
    """What a step computes of one sequence, from where the sequence stands when this is made."""

    sequence: Sequence
    #: How many of its pending tokens.
    num_tokens: int
    #: Guesses of the tokens that follow these.
    drafts: tuple[int, ...] = ()
    #: Position of the first of its tokens.
    first_position: int = field(init=False)
    #: Whether a token is sampled: not while a part of the prompt is left for a later step.
    emits: bool = field(init=False)
    #: Whether its last token is the one that the step before, still under way, will give.
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
        self.emits = self.num_tokens == sequence.num_pending
        self.ahead = first + self.num_tokens > sequence.num_known
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

    def launched(self) -> None:
        """Take the sequence to where it stands once this part is computed."""
        self.sequence.num_computed += self.num_tokens
        self.sequence.num_awaited += self.emits

    def undone(self) -> None:
        """Take the sequence back to before this part, and before all behind it."""
        self.sequence.num_computed = min(self.sequence.num_computed, self.first_position)
        self.sequence.num_noted = min(self.sequence.num_noted, self.first_position)
        self.sequence.num_awaited = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of the model computes; the sequences change only when its tokens are known."""

    phase: Phase
    parts: tuple[Part, ...]
    #: All tokens that are computed, drafts included.
    num_tokens: int = field(init=False)
    #: Rows of logits and tokens that the step gives, part by part.
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
    sequence, first = part.sequence, part.end - len(part.sequence.prompt)
    for offset in range(part.num_rows):
        greedy = sequence.params.greedy or not part.emits
        yield GREEDY_ROW if greedy else sampling_row(sequence.params, sequence.uniform(first + offset))


class StepOutput(NamedTuple):
    """What a step gives, valid until the next step."""

    #: (rows,) int64.
    tokens: Tensor
    #: What the tokens were chosen from, (rows, vocabulary).
    logits: Tensor
    #: How the tokens were chosen.
    sampling: Sampling
    #: Whether the program itself did so.
    captured: bool = True
    #: Tokens that were computed besides, to fill the bucket.
    padding: int = 0
    #: Waits for the tokens and returns them on the host, also when the next step runs already; None where they were
    #: not sent there.
    read: Callable[[], list[int]] | None = None


def sampled_by_request(step: Step, output: StepOutput) -> StepOutput:
    """Return the output with sampled tokens, where a step asks for them and its program took the most likely."""
    if step.sampling == "greedy" or output.sampling != "greedy":
        return output
    params = step.sampling_params(output.logits.device)
    return output._replace(tokens=next_tokens(output.logits, params, "random"), sampling="random", captured=False)


class Flight(NamedTuple):
    """A step that was begun, and what it gives once it is done."""

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


def table_names(group: int) -> tuple[str, str]:
    """Return the names of the block table and the slot mapping of a group of layers."""
    suffix = f"_{group}" if group else ""
    return f"block_table{suffix}", f"slot_mapping{suffix}"


def step_inputs(max_blocks: int, num_groups: int = 1, *, shaped: bool = False) -> dict[str, InputSpec]:
    """Declare a step's inputs: `tokens` flattened over `seqs` sequences, at most `max_blocks` cache blocks each, and
    `rows` of logits wanted. Each of `num_groups` groups of layers has a block table and a slot mapping of its own.
    shaped: of a program that shapes logits too, by the rows of `Histories`.

    Padding tokens point at the null block and belong to no sequence; padding sequences have length 0.
    """
    more: dict[str, InputSpec] = {}
    for group in range(1, num_groups):
        table, slots = table_names(group)
        more[table], more[slots] = InputSpec(("seqs", max_blocks), torch.int32), InputSpec(("tokens",), torch.int64)
    if shaped:
        more["history_rows"] = InputSpec(("tokens",), torch.int64)
    return {
        "input_ids": InputSpec(("tokens",), torch.int64),
        "position_ids": InputSpec(("tokens",), torch.int64),
        "slot_mapping": InputSpec(("tokens",), torch.int64),
        "block_table": InputSpec(("seqs", max_blocks), torch.int32),
        "seq_lens": InputSpec(("seqs",), torch.int32),
        "query_starts": InputSpec(("seqs + 1",), torch.int32, padding="edge"),
        "logit_rows": InputSpec(("rows",), torch.int64),
        **more,
        "sampling_params": sampling_params_input("rows"),
    }


def step_tensors(
    step: Step, *, max_blocks: int, block_size: int, device: torch.device, groups: slice = FIRST_GROUP
) -> dict[str, Tensor]:
    """Return the declared inputs of a step but `sampling_params`; each sequence's blocks must suffice for its tokens.

    groups: which of the sequences' tables are the model's.
    A draft that turns out wrong leaves keys and values in its slot. They lie behind the sequence's length, where
    attention does not read, and are overwritten when the sequence gets there.
    """
    sizes = {"tokens": step.num_tokens, "seqs": len(step.parts), "rows": step.num_rows}
    declared = step_inputs(max_blocks, groups.stop - groups.start)
    del declared["sampling_params"]
    tensors = {name: torch.zeros(spec.resolve(sizes), dtype=spec.dtype) for name, spec in declared.items()}
    write_step(step, {name: tensor.numpy() for name, tensor in tensors.items()}, block_size=block_size, groups=groups)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def write_step(
    step: Step,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    *,
    block_size: int,
    groups: slice = FIRST_GROUP,
    versions: MutableSequence[int] | None = None,
) -> None:
    """Write the declared inputs of a step but `sampling_params` into arrays of a bucket's size, padding included.

    groups: which of the sequences' tables are the model's.
    versions: for each row of the block tables the `Sequence.version` that it holds, 0 for zeros; rows that are right
    are left alone and the others noted.
    """
    num_seqs, num_tokens = len(step.parts), step.num_tokens
    counts = np.array([part.num_tokens + len(part.drafts) for part in step.parts])
    firsts = np.array([part.first_position for part in step.parts])
    ends, stops = counts.cumsum(), firsts + counts
    held = np.array([len(part.sequence.tables[groups.start]) for part in step.parts])
    assert (stops <= held * block_size).all()  # behind a sequence's own blocks the table names the null block
    seqs, shifts = np.arange(num_seqs), stops - ends
    if 1 < num_seqs < num_tokens:
        seqs, shifts = np.repeat(seqs, counts), np.repeat(shifts, counts)
    positions = np.arange(num_tokens) + shifts
    places = positions // block_size
    width = arrays["block_table"].shape[1]
    changed = _changed_rows(step, arrays["block_table"].shape[0], versions)
    for group in range(groups.start, groups.stop):
        tables, slots = (arrays[name] for name in table_names(group - groups.start))
        for row, sequence in changed:
            put(tables[row], sequence.tables[group] if sequence else [])
        blocks = tables.reshape(-1).take(places + seqs * width).astype(np.int64)
        put(slots, (blocks - places) * block_size + positions)
    put(arrays["position_ids"], positions)
    _write_tokens(step, arrays["input_ids"], ends)
    put(arrays["seq_lens"], stops)
    starts = arrays["query_starts"]
    starts[0] = 0
    put(starts[1:], ends, padding=num_tokens)
    put(arrays["logit_rows"], _logit_rows(step, ends))


def _changed_rows(
    step: Step, num_rows: int, versions: MutableSequence[int] | None
) -> list[tuple[int, Sequence | None]]:
    """Return the rows of the block tables that must be written, with the sequence whose blocks they shall hold."""
    wanted: list[Sequence | None] = [*(part.sequence for part in step.parts), *[None] * (num_rows - len(step.parts))]
    if versions is None:
        return list(enumerate(wanted))
    now = [0 if sequence is None else sequence.version for sequence in wanted]
    if versions[:num_rows] == now:
        return []
    changed = [(row, sequence) for row, sequence in enumerate(wanted) if versions[row] != now[row]]
    versions[:num_rows] = now
    return changed


def _write_tokens(step: Step, array: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
    start = 0
    for part, end in zip(step.parts, ends.tolist(), strict=True):
        sequence, first = part.sequence, part.first_position
        if part.ahead and part.num_tokens == 1:
            array[start] = 0
        elif first + part.num_tokens <= len(sequence.prompt) and not part.drafts:
            array[start:end] = sequence.prompt_ids[first : first + part.num_tokens]
        else:
            array[start:end] = part.tokens
        start = end
    array[start:] = 0


def _logit_rows(step: Step, ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if step.num_rows == len(step.parts):
        return ends - 1
    each = zip(ends.tolist(), step.parts, strict=True)
    return np.array([row for end, part in each for row in range(end - part.num_rows, end)])


def put(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | list[int], padding: int = 0) -> None:
    """Write values into the beginning of an array, and padding behind them."""
    array[: len(values)] = values
    array[len(values) :] = padding
