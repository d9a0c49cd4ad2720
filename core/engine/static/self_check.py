"""The check that rows of a static cache give what the model gives for each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.indexing import checked_indices
from core.engine.inspect.probe import (
    LONG,
    SHORT,
    forward_logits,
    function_bound,
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
        expected = forward_logits(self.model, tokens, first=first - 1)
        return largest_difference([torch.stack(self._logits[row])], [expected])


def told_of(error: Exception) -> str:
    """Return an error of a model's code in a few words."""
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()), 120)}"


@torch.no_grad()
@checked_indices()
def why_not_in_rows(run: RunRows, *, max_model_len: int) -> str:
    """Return why sequences can't be computed in rows; "" where they can.

    The model is told the positions of all rows as the cache's length, or, where nothing is computed of that, the length
    of the longest.
    """
    if min(max_model_len - 1, LONG) < SHORT + _NUM_STEPS:
        return f"a context of {max_model_len} tokens is too short to check rows"
    probes = _probes(run.model, max_model_len)
    bound = rounding_bound(run.model, probes, own_logits(run.model, probes))
    found = []
    for told in (None,) if isinstance(run.rows.step, PackedStep) else (max_model_len - 1, None):
        run.rows.step.told = told
        try:
            if told is not None and _depends_on_length(run, *probes, bound=bound):
                why = "it computes something of the length of the cache, and that of each row is another"
            else:
                why = _why_not(run, *probes, bound=bound)
        except Exception as error:  # the model's code may raise anything
            why = told_of(error)
        if not why:
            return ""
        found.append(why)
    return "; ".join(dict.fromkeys(found))


@torch.no_grad()
def why_not_in_graphs(run: RunRows, *, max_model_len: int) -> str:
    """Return how graphs of rows that passed `why_not_in_rows` differ from the model; "" where they don't.

    Kernels round otherwise than the model's code; that they compute another function shows far above that.
    """
    return _why_not(run, *_probes(run.model, max_model_len), bound=function_bound(run.model))


def _probes(model: Any, max_model_len: int) -> list[list[int]]:
    """Return a long and a short sequence."""
    longest = min(max_model_len - 1, LONG)
    return [probe_tokens(model, longest, 3), probe_tokens(model, SHORT + _NUM_STEPS, 11)]


def _begin(run: RunRows, long: list[int], short: list[int]) -> int:
    """Begin both sequences in rows full of other values; return the row of the long one, the last."""
    for tensor in run.rows.tensors:
        tensor.fill_(_STALE)
    last = run.rows.num_rows - 1
    run.join(last, long)
    run.join(0, short)
    return last


def _why_not(run: RunRows, long: list[int], short: list[int], *, bound: float) -> str:
    """Return how sequences in rows differ from the model's own forward; "" where they don't.

    Both share steps, beside idle rows, and one waits while the other runs. Then a smaller step runs, beside rows that
    nobody has any more, and the long one's row is used anew by a shorter sequence.
    """
    num_rows, last = run.rows.num_rows, _begin(run, long, short)
    for rows in ((0, last), (0,), (0,), (0, last)):
        run.step(rows, num_rows)
    for row, which in ((0, "a short"), (last, "a long")):
        if not (found := run.difference(row)) <= bound:
            return f"{which} sequence in a row beside others differs from its own forward by {found:.2g}"
    run.join(0, short)
    run.step((0,), 1)
    run.join(last, short[1:])
    run.step((0, last), num_rows)
    run.step((last,), num_rows)
    for row in (0, last):
        if not (found := run.difference(row)) <= bound:
            return f"a sequence in a row that held another one differs from its own forward by {found:.2g}"
    return ""


def _depends_on_length(run: RunRows, long: list[int], short: list[int], *, bound: float) -> bool:
    """Tell whether the length that the model is told changes what it computes, or can't be much longer."""
    last = _begin(run, long, short)
    step, rows, num_rows = run.rows.step, [0, last], run.rows.num_rows
    before = [state.clone() for state in run.rows.states]
    logits = run.again(rows, num_rows)[rows].clone()
    for state, kept in zip(run.rows.states, before, strict=True):
        state.copy_(kept)
    told, step.told = step.told, _TOLD_APART
    try:
        other = run.again(rows, num_rows)[rows]
    except Exception:  # a table that ends before that length, for example
        return True
    finally:
        step.told = told
    return not relative_difference(logits, other) <= bound / 8
