"""The tokens of sequences and their penalties on the device, so that shaping logits needs nothing from the host.

A step notes its own inputs before it looks at its sequences' tokens. So the host need not know them, drafts count for
the rows behind them, and a step that runs twice, or whose drafts were wrong, leaves nothing behind: as with the
key/value cache, each place is written again before it is read.

Legend of shapes: T tokens of a step, R rows of logits, V vocabulary, L longest context, S sequences at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.engine.steps.penalties import drop, least_share, neutral_row, penalise, rules_row
from core.engine.steps.sampling import next_tokens
from core.engine.steps.sequence import NUM_SLOTS, Sequence
from core.engine.steps.step import Part, Step, StepOutput
from core.errors import ModelError

STEP_OF_HISTORIES = ("input_ids", "position_ids", "logit_rows")
"""The inputs of a step that `Histories.choose` takes, besides the rows."""


class Histories:
    """Rows of device memory for sequences whose logits are shaped, each taken when its sequence first needs it.

    A sequence may lose its row to another one once it is in no step; it gets a row again from what the host knows. Row
    0 belongs to all other sequences: it is written but never read. Addresses never change, so captured graphs may hold
    them.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        """Take 4 * (S + 1) * (L + 101) bytes, or raise `ModelError`. max_num_seqs: of one step."""
        neutral = [*neutral_row(NUM_SLOTS), -torch.inf]
        try:
            self.tokens = torch.zeros((max_num_seqs + 1, max_model_len), dtype=torch.int32, device=device)
            self.rules = torch.tensor([neutral], dtype=torch.float32).repeat(max_num_seqs + 1, 1).to(device)
        except torch.OutOfMemoryError as error:
            num_bytes = 4 * (max_num_seqs + 1) * (max_model_len + len(neutral))
            raise ModelError(
                f"{num_bytes} bytes for the penalties of {max_num_seqs} sequences of {max_model_len} tokens",
                found=f"the memory of {device} ran out: {' '.join(str(error).split())[:200]}",
                remedy="free memory of the device, or lower max_num_seqs or max_model_len",
            ) from None
        # By index of the sequence, the one that was used last at the end.
        self._rows: dict[int, int] = {}

    def rows_of(self, step: Step) -> np.ndarray[Any, Any]:
        """Return the row that each token of a step belongs to, (T,) int64, all that lies before them filled in."""
        parts = [part for part in step.parts if part.is_shaped]
        if not parts:
            return np.zeros(step.num_tokens, dtype=np.int64)
        for part in parts:
            if part.sequence.index in self._rows:  # the latest ones: no other sequence of the step may take their rows
                self._rows[part.sequence.index] = self._rows.pop(part.sequence.index)
        taken = {part.sequence.index: self._row(part) for part in parts}
        counts = [part.num_tokens + len(part.drafts) for part in step.parts]
        return np.repeat([taken.get(part.sequence.index, 0) if part.is_shaped else 0 for part in step.parts], counts)

    def shaped_by_request(
        self, step: Step, output: StepOutput, rows: np.ndarray[Any, Any], inputs: Mapping[str, Tensor]
    ) -> StepOutput:
        """Return the output with the tokens that a step's sequences ask for; to be called once the step was begun.

        rows: of the step. inputs: the step's, on the device, at least `STEP_OF_HISTORIES`.
        """
        if output.sampling != "shaped":
            device, known = output.logits.device, {name: inputs[name] for name in STEP_OF_HISTORIES}
            there = torch.from_numpy(rows).to(device, non_blocking=True)
            tokens = self.choose(output.all_logits(), step.sampling_params(device), history_rows=there, **known)
            output = output._replace(tokens=tokens, sampling="shaped", captured=False)
        for part in step.parts:
            if part.is_shaped:
                part.sequence.num_noted = part.end + len(part.drafts)
        return output

    def choose(
        self,
        logits: Tensor,
        sampling_params: Tensor,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logit_rows: Tensor,
        history_rows: Tensor,
    ) -> Tensor:
        """Note a step's tokens and return the next ones, (R,) int64, as its sequences ask for them.

        logits: (R, V). sampling_params: (R, 4) float32. input_ids, position_ids, history_rows: (T,) int64. logit_rows:
        (R,) int64, the token that each row comes after.
        """
        self.tokens[history_rows, position_ids] = input_ids.to(torch.int32)
        rows, lengths = history_rows[logit_rows], position_ids[logit_rows] + 1
        rules = self.rules[rows]
        values = drop(penalise(logits, self.tokens[rows], lengths, rules[:, :-1]), rules[:, -1])
        return next_tokens(values, sampling_params, "random")

    def _row(self, part: Part) -> int:
        """Return the row of a part's sequence, with all tokens that the sequence has before the part."""
        sequence, first = part.sequence, part.first_position
        row = self._rows.get(sequence.index)
        if row is None:
            row = self._free_row()
            rules = [*rules_row(sequence, NUM_SLOTS), least_share(sequence)]
            self.rules[row].copy_(torch.tensor(rules, dtype=torch.float32), non_blocking=True)
            sequence.num_noted = 0
            # Only now: a step that fails before this runs again, and must write the rules then.
            self._rows[sequence.index] = row
        if sequence.num_noted < first:
            self._fill(row, sequence, first)
        return row

    def _free_row(self) -> int:
        """Return a row that no sequence has, taken from the one that used its own longest ago where all are taken."""
        taken = set(self._rows.values())
        free = next((row for row in range(1, len(self.tokens)) if row not in taken), None)
        return self._rows.pop(next(iter(self._rows))) if free is None else free

    def _fill(self, row: int, sequence: Sequence, end: int) -> None:
        """Copy tokens from the host; the step before may be under way, which the device ends first."""
        known = torch.tensor(sequence.tokens(sequence.num_noted, end - sequence.num_noted), dtype=torch.int32)
        self.tokens[row, sequence.num_noted : end].copy_(known, non_blocking=True)
        sequence.num_noted = end
