"""The check that rows of a static cache give what the model gives for each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from core.engine.inspect.indexing import checked_indices
from core.engine.inspect.probe import (
    LONG,
    SHORT,
    forward_logits,
    largest_difference,
    own_logits,
    probe_tokens,
    relative_difference,
    rounding_bound,
)
from core.engine.static.row_steps import PackedStep
from core.engine.static.rows import Rows

_NUM_STEPS = 4
"""Decode steps of a probe at most."""
_TOLD_APART = 1 << 20
"""A length that no probe has: what changes with it is computed by the length that the model is told."""
_STALE = 3.0
"""What rows hold before a probe: a value like those that keys and values have, which shows wherever it is read."""


class RunRows:
    """Runs sequences of known tokens in rows, and keeps the logits that they give."""

    def __init__(
        self,
        model: Any,
        rows: Rows,
        *,
        prefill: Callable[[list[int], int], Tensor],
        decode: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:
        """prefill, decode: as of `StaticModel`."""
        self.model, self.rows = model, rows
        self._prefill, self._decode = prefill, decode
        self._tokens: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}
        self._logits: dict[int, list[Tensor]] = {}

    def join(self, row: int, tokens: list[int]) -> None:
        """Begin a sequence in a row, in place of what was there: all but `_NUM_STEPS` of its tokens are its prompt."""
        first = len(tokens) - _NUM_STEPS
        self._tokens[row], self._done[row] = tokens, first
        self._logits[row] = [self._prefill(tokens[:first], row)[0].clone()]

    def step(self, rows: Sequence[int], num_rows: int) -> Tensor:
        """Compute the next token of these rows in a step of the first num_rows rows; return its logits."""
        logits = self.again(rows, num_rows)
        for row in rows:
            self._done[row] += 1
            self._logits[row].append(logits[row].clone())
        return logits

    def again(self, rows: Sequence[int], num_rows: int) -> Tensor:
        """Compute what `step` does, and count no token."""
        device = self.rows.tensors[0].device
        done = [self._done.get(row, 0) for row in range(num_rows)]
        tokens = [self._tokens[row][done[row]] if row in rows else 0 for row in range(num_rows)]
        active = torch.tensor([row in rows for row in range(num_rows)], device=device)
        ids, positions = (torch.tensor(each, device=device) for each in (tokens, done))
        return self._decode(ids, positions, active)

    def difference(self, row: int) -> float:
        """Return how the logits of a row's sequence differ from those of the model's own forward."""
        tokens = self._tokens[row][: self._done[row]]
        first = len(self._tokens[row]) - _NUM_STEPS
        expected = forward_logits(self.model, tokens)[first - 1 :]
        return largest_difference([torch.stack(self._logits[row])], [expected])


def told_of(error: Exception) -> str:
    """Return an error of a model's code in a few words."""
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()), 120)}"


@torch.no_grad()
@checked_indices()
def why_not_in_rows(run: RunRows, *, max_model_len: int) -> str:
    """Return why sequences can't be computed in rows; "" where they can.

    A long and a short sequence share steps, beside idle rows and one that waits, and a row is used anew by a shorter
    one. The model is told the positions of all rows as the cache's length, or, where nothing is computed of that, the
    length of the longest.
    """
    longest = min(max_model_len - 1, LONG)
    if longest < SHORT + _NUM_STEPS:
        return f"a context of {max_model_len} tokens is too short to check rows"
    long, short = probe_tokens(run.model, longest, 3), probe_tokens(run.model, SHORT + _NUM_STEPS, 11)
    probes = [long, short]
    bound = rounding_bound(run.model, probes, own_logits(run.model, probes))
    found = []
    for told in (None,) if isinstance(run.rows.step, PackedStep) else (max_model_len - 1, None):
        run.rows.step.told = told
        try:
            why = _why_not(run, long, short, bound)
        except Exception as error:  # the model's code may raise anything
            why = told_of(error)
        if not why:
            return ""
        found.append(why)
    return "; ".join(dict.fromkeys(found))


def _why_not(run: RunRows, long: list[int], short: list[int], bound: float) -> str:
    last, num_rows = run.rows.num_rows - 1, run.rows.num_rows
    for tensor in run.rows.tensors:
        tensor.fill_(_STALE)
    run.join(last, long)
    run.join(0, short)
    if run.rows.step.told is not None and _depends_on_length(run, num_rows, bound):
        return "it computes something of the length of the cache, and that of each row is another"
    run.step((0, last), num_rows)
    run.step((0,), num_rows)  # the last one waits
    run.step((0,), 1)
    run.step((0, last), num_rows)
    for row, which in ((0, "a short"), (last, "a long")):
        if not (found := run.difference(row)) <= bound:
            return f"{which} sequence in a row beside others differs from its own forward by {found:.2g}"
    run.join(last, short[1:])
    run.join(0, short)
    run.step((0, last), num_rows)
    run.step((last,), num_rows)
    if not (found := run.difference(last)) <= bound:
        return f"a sequence in a row that held a longer one differs from its own forward by {found:.2g}"
    return ""


def _depends_on_length(run: RunRows, num_rows: int, bound: float) -> bool:
    """Tell whether the length that the model is told changes what it computes, or it can't have any other."""
    step, rows = run.rows.step, [0, num_rows - 1]
    told, before = step.told, [state.clone() for state in run.rows.states]
    logits = []
    for each in (told, _TOLD_APART):
        step.told = each
        try:
            logits.append(run.again(rows, num_rows)[rows].clone())
        except Exception:  # a table that ends before that length, for example
            return True
        for state, kept in zip(run.rows.states, before, strict=True):
            state.copy_(kept)
    step.told = told
    return not relative_difference(*logits) <= bound / 8
