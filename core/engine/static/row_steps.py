"""How a step of decode is laid out for a model: each row a sequence of the batch, or all rows packed into one sequence.

Legend of shapes: N rows, S positions of each, B rows of a step, which are the first ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RowStep:
    """The step being run, one token of each row, set around each call of the model: rows are the batch.

    Tensors of the cache are (N, …), and a step reads (B, …).
    """

    def __init__(self) -> None:
        #: The position of each row's token, (B,) int64; None between steps.
        self.positions: Tensor | None = None
        #: The length of the cache that the model is told; None tells it the positions.
        self.told: int | None = None

    @property
    def rows(self) -> Tensor:
        """The positions in a step."""
        assert self.positions is not None
        return self.positions

    @property
    def query_offset(self) -> Tensor:
        """Where the queries begin, as `core.engine.static.masks` takes it."""
        return self.rows[:, None]

    @property
    def length(self) -> Any:
        """The length of the cache, as the model is told."""
        return self.query_offset if self.told is None else self.told

    def mask_length(self, num_positions: int) -> int:
        """Return how many keys a query may attend to. num_positions: S."""
        return num_positions

    def arranged(self, values: Tensor) -> Tensor:
        """Return a value of each row, (B,), as the model takes tokens."""
        return values[:, None]

    def last(self, logits: Tensor) -> Tensor:
        """Return the logits (B, vocabulary) of what the model returns."""
        return logits[:, -1]

    def written(self, whole: Tensor, new: Tensor, dim: int) -> Tensor:
        """Write one token of each row at its position; return what the step reads.

        whole: of the cache, positions in `dim`. new: (B, …), of size 1 in `dim`.
        """
        read = whole.narrow(0, 0, new.shape[0])  # a slice might be shorter, as far as a trace knows
        read.scatter_(dim, _expanded(self.rows, new, 0), new)
        return read


class PackedStep(RowStep):
    """Rows are positions of one sequence, each row's behind those of the row before: for models whose code has
    arithmetic on positions that tells tokens apart, but not sequences of a batch.

    Tensors of the cache are (1, …, N * S, …), all of which a step reads. Each query attends to its own row, so N times
    as many scores are computed as are used.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    @property
    def query_offset(self) -> Tensor:
        """Where the queries begin, as `core.engine.static.masks` takes it."""
        return self.rows[:, None].expand(-1, self._num_rows)

    @property
    def length(self) -> Any:
        """The length that gives each token its row's position, counted on from there."""
        return self.rows - torch.arange(self.rows.shape[0], device=self.rows.device)

    def mask_length(self, num_positions: int) -> int:
        """Return how many keys a query may attend to."""
        return num_positions * self._num_rows

    def arranged(self, values: Tensor) -> Tensor:
        """Return a value of each row, (B,), as the model takes tokens."""
        return values[None]

    def last(self, logits: Tensor) -> Tensor:
        """Return the logits (B, vocabulary) of what the model returns."""
        return logits[0]

    def written(self, whole: Tensor, new: Tensor, dim: int) -> Tensor:
        """Write one token of each row at its position; return what the step reads. new: of size B in `dim`."""
        size = whole.shape[dim] // self._num_rows
        places = torch.arange(self.rows.shape[0], device=new.device) * size + self.rows
        whole.scatter_(dim, _expanded(places, new, dim), new)
        return whole


def _expanded(index: Tensor, new: Tensor, dim: int) -> Tensor:
    """Return an index (B,) of the entries in a dimension as an index of the shape of `new`.

    By sizes of its own: a trace may have two names for B, and would take their equality for a number.
    """
    shape = [-1 if each == dim else size for each, size in enumerate(new.shape)]
    return index.view(-1, *[1] * (new.dim() - dim - 1)).expand(shape)
