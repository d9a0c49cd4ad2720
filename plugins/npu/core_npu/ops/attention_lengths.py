"""Lengths of sequences as `npu_fused_infer_attention_score` wants them: lists of the host, in plain Python.

T rows of query, of which the first `starts[-1]` are real; lens and starts as `core::attention` has them. The kernel
attends for all T rows, so padding rows get a sequence too, and its results are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from core.errors import UsageError

__all__ = ["decode_keys", "packed_ends", "packed_keys"]


def packed_ends(num_rows: int, starts: Sequence[int]) -> list[int]:
    """Return where each sequence ends among the rows, and behind them one more that ends with the last row."""
    return [*starts[1:], num_rows]


def packed_keys(num_rows: int, capacity: int, lens: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return how many keys each sequence has; the one of padding as many as rows, at most `capacity`, and at least one.

    A row of padding that saw no key at all would have no softmax.
    """
    return [*lens, min(max(num_rows - starts[-1], 1), capacity)]


def decode_keys(num_rows: int, lens: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return how many keys each row of a decode step sees; row i is sequence i's, and a row of padding sees one key.

    Raises `UsageError` where a sequence without a token stands before one with a token: then only the device could
    match rows with block tables.
    """
    counts = [stop - start for start, stop in pairwise(starts)]
    live = starts[-1]
    if counts[:live] != [1] * live:
        raise UsageError(
            f"attention of a decode step with {counts} tokens by sequence",
            found="a sequence brings other than one token before the padding begins",
            remedy="order the batch so that sequences of padding come last, or say max_query_len=0",
        )
    return [*lens[:live], *[1] * (num_rows - live)]
