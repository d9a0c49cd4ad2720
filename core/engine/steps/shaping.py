"""Logits that the host has a part in: what a grammar allows, more biases than the device has room for, and how probable
the model found a token.

Everything else that a sequence asks of its logits, `core.engine.steps.histories` does on the device. Here it is done
for the rows that ask for it, outside of the captured graphs; steps with such rows are not queued ahead.

Legend of shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.engine.steps.penalties import drop, least_share, penalise, rules_row
from core.engine.steps.sequence import Sequence, TokenLogprobs
from core.engine.steps.step import Part, Step, StepOutput


class Row(NamedTuple):
    """A row of a step's logits."""

    #: The index of the row.
    number: int
    sequence: Sequence
    #: Drafts before it, which count as tokens of its history.
    drafts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """The rows of a step whose logits or probabilities the host must handle."""

    #: Rows whose logits are changed before a token is chosen.
    shaped: tuple[Row, ...]
    #: Rows whose probabilities are reported.
    reported: tuple[Row, ...]

    @classmethod
    def of(cls, step: Step, output: StepOutput) -> HostRows:
        """Return the rows of a step; none for a sequence whose prompt is not finished."""
        shaped: list[Row] = []
        reported: list[Row] = []
        first = 0
        for part in step.parts:
            if part.emits:
                shaped += _rows(part, first) if is_shaped_here(part, output) else ()
                reported += _rows(part, first) if part.sequence.params.logprobs is not None else ()
            first += part.num_rows
        return cls(shaped=tuple(shaped), reported=tuple(reported))


def is_shaped_here(part: Part, output: StepOutput) -> bool:
    """Tell whether a part's logits are left to be shaped on the host's account."""
    return part.sequence.shaping == "host" or (part.is_shaped and output.sampling != "shaped")


def needs_host(step: Step) -> bool:
    """Tell whether the host has to see a step's logits before the next step can begin."""
    return any(part.sequence.wants_host for part in step.parts)


def _rows(part: Part, first: int) -> list[Row]:
    return [Row(first + offset, part.sequence, part.drafts[:offset]) for offset in range(part.num_rows)]


def shape(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Return the logits (R, V) float32 from which tokens of these rows are chosen; `logits` stays as it is.

    What `penalise` does, then -inf for what a constraint does not allow, and for what `min_p` leaves out.
    """
    device = logits.device
    texts = [[*row.sequence.prompt, *row.sequence.generated, *row.drafts] for row in rows]
    longest, num_slots = max(map(len, texts)), max(1, *(row.sequence.num_slots for row in rows))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], dtype=torch.int32, device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    rules = torch.tensor([rules_row(row.sequence, num_slots) for row in rows], dtype=torch.float32, device=device)
    found = penalise(logits[[row.number for row in rows]], tokens, lengths, rules)
    for logit, (_, sequence, drafts) in zip(found, rows, strict=True):
        allowed = None if sequence.constraint is None else sequence.constraint.allowed(drafts)
        if allowed is not None:
            logit[: len(allowed)].masked_fill_(~torch.from_numpy(allowed).to(device), -math.inf)
            logit[len(allowed) :] = -math.inf  # rows that pad the vocabulary
    shares = torch.tensor([least_share(row.sequence) for row in rows], dtype=torch.float32, device=device)
    return drop(found, shares)


def report(logits: Tensor, tokens: Rows[int], rows: Rows[Row]) -> None:
    """Give each sequence of the rows the log-probabilities of its tokens, as the model has them, before all shaping.

    logits: (all rows of the step, V). tokens: one for each of them.
    """
    logs = logits[[row.number for row in rows]].to(torch.float32).log_softmax(dim=-1)
    chosen = (
        logs.gather(1, torch.tensor([[tokens[row.number]] for row in rows], device=logs.device)).squeeze(1).tolist()
    )
    most = max(row.sequence.params.logprobs or 0 for row in rows)
    values, ids = (each.tolist() for each in logs.topk(most, dim=-1))
    for row, logprob, top_ids, top_values in zip(rows, chosen, ids, values, strict=True):
        count = row.sequence.params.logprobs or 0
        top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
        if not row.drafts:
            row.sequence.reported = []  # drop entries of an earlier step for wrong drafts
        row.sequence.reported.append(TokenLogprobs(token_id=tokens[row.number], logprob=logprob, top=top))
