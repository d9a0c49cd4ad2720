"""One sequence being generated, and the tensors of a step over several of them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from core.common.graphs.inputs import InputSpec
from core.engine.config import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Sequence:
    """A prompt and what was generated from it so far. num_computed: tokens whose keys and values are in the cache."""

    index: int
    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator | None = None
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated)

    def pending(self) -> list[int]:
        """Return the tokens not computed yet: the prompt at first, later the one token sampled last."""
        done = self.num_computed - len(self.prompt)
        return self.generated[done:] if done >= 0 else self.prompt[self.num_computed :] + self.generated


def step_inputs(max_blocks: int) -> dict[str, InputSpec]:
    """Declare a step's inputs: `tokens` flattened over `seqs` sequences, at most `max_blocks` cache blocks each.

    Padding tokens point at the null block and belong to no sequence; padding sequences have length 0.
    """
    return {
        "input_ids": InputSpec(("tokens",), torch.int64),
        "position_ids": InputSpec(("tokens",), torch.int64),
        "slot_mapping": InputSpec(("tokens",), torch.int64),
        "block_table": InputSpec(("seqs", max_blocks), torch.int32),
        "seq_lens": InputSpec(("seqs",), torch.int32),
        "query_starts": InputSpec(("seqs + 1",), torch.int32, padding="edge"),
        "logit_rows": InputSpec(("seqs",), torch.int64),
    }


def step_tensors(
    sequences: SequenceOf[Sequence], *, max_blocks: int, block_size: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the inputs of a step that computes every pending token; each sequence's blocks must suffice for them."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence in sequences:
        pending = sequence.pending()
        span = range(sequence.num_computed, sequence.num_computed + len(pending))
        input_ids += pending
        positions += span
        slots += [sequence.blocks[p // block_size] * block_size + p % block_size for p in span]
        starts.append(len(input_ids))
    table = [s.blocks + [0] * (max_blocks - len(s.blocks)) for s in sequences]

    def tensor(data: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(data, dtype=dtype).to(device, non_blocking=True)

    return {
        "input_ids": tensor(input_ids, torch.int64),
        "position_ids": tensor(positions, torch.int64),
        "slot_mapping": tensor(slots, torch.int64),
        "block_table": tensor(table, torch.int32),
        "seq_lens": tensor([len(s) for s in sequences], torch.int32),
        "query_starts": tensor(starts, torch.int32),
        "logit_rows": tensor([end - 1 for end in starts[1:]], torch.int64),
    }
