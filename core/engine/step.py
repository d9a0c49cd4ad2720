"""One step of the engine: which tokens of which sequences are computed, and the tensors a model is given for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from core.common.graphs.inputs import InputSpec
from core.engine.sampling import GREEDY_ROW, sampling_params_input, sampling_row
from core.engine.sequence import Sequence

Phase = Literal["prefill", "decode", "verify"]
"""prefill: a step that holds tokens of any prompt. decode: exactly one token of each sequence, the one sampled last.
verify: the same with drafts behind some of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one sequence: its next `num_tokens` pending tokens, and guesses of what follows them."""

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()

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
        """The tokens to compute, drafts last."""
        return [*self.sequence.pending()[: self.num_tokens], *self.drafts]


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of the model computes; nothing of it changes the sequences until its tokens are known."""

    phase: Phase
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        """Rows of logits and tokens that the step gives, part by part."""
        return sum(part.num_rows for part in self.parts)

    @property
    def is_random(self) -> bool:
        """Whether any of its tokens is sampled rather than the most likely one."""
        return any(part.emits and not part.sequence.params.greedy for part in self.parts)

    def sampling_params(self, device: torch.device) -> Tensor:
        """Return how the token of each row is to be chosen, (num_rows, 4) float32; see `sampling_row`."""
        return _tensor([row for part in self.parts for row in _sampling_rows(part)], torch.float32, device)


def _sampling_rows(part: Part) -> Iterator[tuple[float, ...]]:
    sequence, first = part.sequence, len(part.sequence.generated)
    for offset in range(part.num_rows):
        greedy = sequence.params.greedy or not part.emits
        yield GREEDY_ROW if greedy else sampling_row(sequence.params, sequence.uniform(first + offset))


class StepOutput(NamedTuple):
    """What a step gives, valid until the next: tokens (rows,) int64 and the logits (rows, vocabulary) they are from.

    sampled: random rows were sampled; otherwise every token is the most likely one.
    """

    tokens: Tensor
    logits: Tensor
    sampled: bool


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
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    lens: list[int] = []
    starts = [0]
    rows: list[int] = []
    for part in step.parts:
        sequence, tokens = part.sequence, part.tokens
        span = range(sequence.num_computed, sequence.num_computed + len(tokens))
        input_ids += tokens
        positions += span
        slots += [sequence.blocks[p // block_size] * block_size + p % block_size for p in span]
        lens.append(span.stop)
        starts.append(len(input_ids))
        rows += range(len(input_ids) - part.num_rows, len(input_ids))
    table = [[*p.sequence.blocks, *[0] * (max_blocks - len(p.sequence.blocks))] for p in step.parts]
    return {
        "input_ids": _tensor(input_ids, torch.int64, device),
        "position_ids": _tensor(positions, torch.int64, device),
        "slot_mapping": _tensor(slots, torch.int64, device),
        "block_table": _tensor(table, torch.int32, device),
        "seq_lens": _tensor(lens, torch.int32, device),
        "query_starts": _tensor(starts, torch.int32, device),
        "logit_rows": _tensor(rows, torch.int64, device),
    }


def _tensor(data: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(data, dtype=dtype).to(device, non_blocking=True)
