"""What a sequence's own history does to its logits: penalties, biases, tokens that may not come yet, and `min_p`.

It depends on tokens that the host knows and a captured graph does not. So it runs outside of the graph, on the device
of the logits, for the rows that ask for it, and steps with such rows are not queued ahead.

Legend of shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.engine.steps.sequence import Sequence, TokenLogprobs
from core.engine.steps.step import Part, Step


class Row(NamedTuple):
    """A row of a step's logits."""

    #: Which.
    number: int
    sequence: Sequence
    #: Drafts before it, which stand for tokens of its history.
    drafts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """The rows of a step whose tokens, or whose probabilities, the host has to do with."""

    #: Those whose logits are changed before a token is chosen.
    shaped: tuple[Row, ...]
    #: Those whose probabilities are reported.
    reported: tuple[Row, ...]

    @classmethod
    def of(cls, step: Step) -> HostRows:
        """Return the rows of a step; none of a sequence whose prompt goes on."""
        shaped: list[Row] = []
        reported: list[Row] = []
        first = 0
        for part in step.parts:
            if part.emits:
                shaped += _rows(part, first) if part.sequence.is_shaped else ()
                reported += _rows(part, first) if part.sequence.params.logprobs is not None else ()
            first += part.num_rows
        return cls(shaped=tuple(shaped), reported=tuple(reported))


def needs_host(step: Step) -> bool:
    """Tell whether the host has to see a step's logits before the next step can begin."""
    return any(part.sequence.wants_host for part in step.parts)


def _rows(part: Part, first: int) -> list[Row]:
    return [Row(first + offset, part.sequence, part.drafts[:offset]) for offset in range(part.num_rows)]


def shape(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Return the logits (R, V) float32 from which tokens of these rows are chosen; `logits` stays as it is.

    In this order: `repetition_penalty` for tokens of prompt and answer (a positive logit is divided by it, a negative
    one multiplied), `presence_penalty` once and `frequency_penalty` for each time that the answer has a token,
    `logit_bias`, -inf for what ends the sequence before `min_tokens`, for what its constraint does not allow, and for
    what `min_p` leaves out.
    """
    found = logits[[row.number for row in rows]].to(torch.float32)
    for logit, (_, sequence, drafts) in zip(found, rows, strict=True):
        _shape_row(logit, sequence, drafts)
    return found


def _shape_row(logit: Tensor, sequence: Sequence, drafts: tuple[int, ...]) -> None:
    """Change one row (V,) in place."""
    params, device, answer = sequence.params, logit.device, [*sequence.generated, *drafts]
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*sequence.prompt, *answer}), device=device)
        values = logit[seen]
        logit[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(answer, device=device).unique(return_counts=True)
        logit[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logit.dtype)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        added = torch.tensor(biases, dtype=logit.dtype, device=device)
        logit.index_add_(0, torch.tensor(ids, device=device), added)  # an id may stand there twice
    ends = [each for each in sequence.stop_token_ids if each < len(logit)]
    if len(answer) < params.min_tokens and ends:
        logit[torch.tensor(ends, device=device)] = -math.inf
    allowed = None if sequence.constraint is None else sequence.constraint.allowed(drafts)
    if allowed is not None:
        logit[: len(allowed)].masked_fill_(~torch.from_numpy(allowed).to(device), -math.inf)
        logit[len(allowed) :] = -math.inf  # rows that pad the vocabulary
    if params.min_p and not params.greedy:
        # p >= min_p * the largest p, of probabilities at the temperature.
        logit.masked_fill_(logit < logit.max() + params.temperature * math.log(params.min_p), -math.inf)


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
            row.sequence.reported = []  # what an earlier step left for drafts that were wrong
        row.sequence.reported.append(TokenLogprobs(token_id=tokens[row.number], logprob=logprob, top=top))
