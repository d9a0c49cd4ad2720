"""Penalties and biases on a sequence's logits, as functions that can be traced and captured with the model.

Legend of shapes: R rows of logits, V vocabulary, L tokens that a sequence may have, B slots for biases.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.engine.steps.sequence import Sequence

_FIELDS = 4
"""Numbers of a row of rules before its slots; each slot has 3: token id, what is added, and until which length."""


def rules_row(sequence: Sequence, num_slots: int) -> list[float]:
    """Return a sequence's penalties and biases as 4 + 3 * num_slots numbers.

    They are the repetition, presence and frequency penalty and the length of the prompt, then num_slots biases, each an
    id, a value, and the length from which it is not added any more: `logit_bias` has no such length, and what ends a
    sequence has -inf until it has `min_tokens`. num_slots: at least `sequence.num_slots`.
    """
    params, num_prompt = sequence.params, len(sequence.prompt)
    penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty, float(num_prompt)]
    slots = [(token, bias, math.inf) for token, bias in params.logit_bias]
    if params.min_tokens:
        slots += [(token, -math.inf, num_prompt + params.min_tokens) for token in sorted(sequence.stop_token_ids)]
    slots += [(0, 0.0, 0)] * (num_slots - len(slots))
    return penalties + [float(number) for slot in slots for number in slot]


def neutral_row(num_slots: int) -> list[float]:
    """Return a row of rules that changes no logit."""
    return [1.0] + [0.0] * (_FIELDS - 1 + 3 * num_slots)


def least_share(sequence: Sequence) -> float:
    """Return how far a logit may be below the row's largest one: `min_p`, at the temperature; -inf for any."""
    params = sequence.params
    # p >= min_p * the largest p, of probabilities at the temperature.
    return params.temperature * math.log(params.min_p) if params.min_p and not params.greedy else -math.inf


def penalise(logits: Tensor, tokens: Tensor, lengths: Tensor, rules: Tensor) -> Tensor:
    """Return the logits (R, V) float32 with penalties and biases; `logits` stays as it is.

    logits: (R, V), floating. tokens: (R, L) int32, those of each row's sequence, drafts included. lengths: (R,) int64,
    how many of them count. rules: (R, 4 + 3 * B) float32, a `rules_row` each. In this order: `repetition_penalty` for
    tokens of prompt and answer (a positive logit is divided by it, a negative one multiplied), `presence_penalty` once
    and `frequency_penalty` for each time that the answer has a token, and the biases. A row of neutral rules keeps its
    values.
    """
    values, (num_rows, size) = logits.to(torch.float32), logits.shape
    repetition, presence, frequency, num_prompt = rules[:, :_FIELDS].split(1, dim=1)
    places, ends = torch.arange(tokens.shape[1], device=tokens.device), lengths[:, None]
    held = places < ends
    # Unused places add zero, at different ids: a device serialises additions to one id.
    ids = torch.where(held, tokens, places % size).to(torch.int64)
    none = torch.zeros((num_rows, size), dtype=torch.float32, device=values.device)
    seen = none.scatter_add(1, ids, held.to(torch.float32)) > 0
    counts = none.scatter_add(1, ids, (held & (places >= num_prompt)).to(torch.float32))
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    values = torch.where(counts > 0, values - (presence + frequency * counts), values)
    biased, biases, untils = rules[:, _FIELDS:].unflatten(1, (-1, 3)).unbind(dim=2)
    biases = torch.where((ends < untils) & (biased < size), biases, 0.0)
    return values.scatter_add(1, biased.to(torch.int64).clamp(max=size - 1), biases)


def drop(logits: Tensor, shares: Tensor) -> Tensor:
    """Return the logits (R, V) with -inf for those that fall short of the row's largest one; shares: (R,) float32, a
    `least_share` each."""
    return logits.masked_fill(logits < logits.amax(dim=1, keepdim=True) + shares[:, None], -math.inf)
