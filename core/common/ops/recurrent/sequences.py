"""Packed sequences: the tokens of each in a row, in chunks that a recurrence computes as products of matrices.

Shapes: T rows, S sequences, Q rows of a chunk, U chunks at most. Nothing here is read on the host, so that a call can
be captured: there are as many chunks as sequences of these many rows can need, and the last ones may hold no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ScanChunk = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Takes the state before a chunk and the chunk's rows of each input, (H, Q, …) with zeros for missing rows; returns the
state after it and the chunk's results, (H, Q, …)."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows lie in their sequences."""

    #: (T,) int64: the sequence of each row; S for padding.
    sequence: Tensor
    #: (T,) int64: how many rows of its sequence come before it.
    offset: Tensor
    #: (S + 1,) int64.
    starts: Tensor

    @classmethod
    def of(cls, query_starts: Tensor, num_rows: int) -> Places:
        """Return the places of num_rows rows; query_starts (S + 1,) as the ops take it."""
        starts = query_starts.long()
        rows = torch.arange(num_rows, device=starts.device)
        sequence = torch.bucketize(rows, starts[1:], right=True)
        return cls(sequence, rows - starts[sequence], starts)

    @property
    def lengths(self) -> Tensor:
        """(S,) int64: the rows of each sequence."""
        return self.starts.diff()

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x (T, …) with zeros in the rows of padding."""
        padding = self.sequence == len(self.starts) - 1
        return x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0.0)


def scan(
    inputs: Sequence[Tensor], states: Tensor, query_starts: Tensor, step: ScanChunk, *, size: int
) -> tuple[Tensor, Tensor]:
    """Move the states of packed sequences on chunk by chunk; return the results (T, H, …) and the new states.

    inputs: (T, H, …) each. states (S, H, …): of the sequences before their first rows. size: Q.
    """
    num_rows, num_seqs = inputs[0].shape[0], states.shape[0]
    starts = query_starts.long()
    counts = (starts.diff() + size - 1) // size
    ends = counts.cumsum(0)
    chunks = torch.arange(num_rows // size + num_seqs if num_rows else 0, device=starts.device)
    sequence = torch.bucketize(chunks, ends, right=True)  # S: a chunk without rows
    firsts = torch.cat((ends - counts, ends[-1:]))
    rows = (starts[sequence] + (chunks - firsts[sequence]) * size)[:, None] + torch.arange(size, device=starts.device)
    real = rows < starts[(sequence + 1).clamp(max=num_seqs)][:, None]  # (U, Q)
    current = torch.cat((states, torch.zeros_like(states[:1])))
    results: list[Tensor] = []
    for chunk in range(len(chunks)):
        here = rows[chunk].clamp(max=num_rows - 1)
        taken = [_masked(x.index_select(0, here), real[chunk]).transpose(0, 1) for x in inputs]
        own = sequence[chunk : chunk + 1]
        state, result = step(current.index_select(0, own)[0], taken)
        current = current.index_copy(0, own, state[None])
        results.append(result.transpose(0, 1))
    if not results:
        return inputs[0].new_empty((0,)), current[:-1]
    found = torch.cat(results)  # (U * Q, H, …)
    out = found.new_zeros((num_rows + 1, *found.shape[1:]))
    out.index_copy_(0, torch.where(real, rows, num_rows).flatten(), found)
    return out[:-1], current[:-1]


def _masked(x: Tensor, real: Tensor) -> Tensor:
    """Return x (Q, …) with zeros where no row is: memory there may hold NaN."""
    return torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def decays(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return by what a state has decayed up to each row of a chunk, and from each row up to each other.

    logs (H, Q), logarithms of the decay in each row, gives (H, Q) and (H, Q, Q), 0 where the second row comes later;
    (H, Q, D) gives (H, Q, D) and (H, Q, Q, D).
    """
    size = logs.shape[1]
    pairs = torch.ones(size, size, dtype=torch.bool, device=logs.device)
    later = pairs.triu(1) if logs.dim() == 2 else pairs.triu(1)[..., None]
    # Each pair is a sum of its own: the difference of two sums from the first row on would round as those do.
    between = logs[:, :, None].expand(-1, -1, size, *[-1] * (logs.dim() - 2))
    own = pairs.tril(-1) if logs.dim() == 2 else pairs.tril(-1)[..., None]
    between = between.masked_fill(~own, 0.0).cumsum(1).masked_fill(later, -torch.inf)
    return logs.cumsum(1).exp(), between.exp()
