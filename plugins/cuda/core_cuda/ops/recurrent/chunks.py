"""Prompts in chunks of rows: what a state has decayed by within one, and where chunks of packed sequences lie.

A chunk turns so many steps of a recurrence into products of matrices. Sequence i has its chunks at the places
`query_starts[i] // CHUNK + i` and on, of `rows // CHUNK + sequences` in all: no two share one, and nothing is counted
beforehand.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.recurrent.states import exponential, rows_of

MIN_SIZE = 16
"""Rows and columns of a product at least."""


def block_of(size: int) -> int:
    """Return the size of a block that holds so many rows or columns, and can be multiplied."""
    return max(MIN_SIZE, int(triton.next_power_of_2(size)))


@triton.jit
def place_of(query_starts, sequence, CHUNK: tl.constexpr):
    """Return the place of the first chunk of a sequence."""
    return tl.load(query_starts + sequence) // CHUNK + sequence


@triton.jit
def sequence_at(query_starts, place, num_sequences, CHUNK: tl.constexpr):
    """Return the sequence that has a place."""
    low, high = 0, num_sequences - 1
    while low < high:  # the last sequence whose first place is not behind
        middle = (low + high + 1) // 2
        before = place_of(query_starts, middle, CHUNK) <= place
        low, high = tl.where(before, middle, low), tl.where(before, high, middle - 1)
    return low


@triton.jit
def chunk_at(query_starts, place, num_sequences, CHUNK: tl.constexpr):
    """Return the first row of the chunk at a place and the first after it; none lie between where it holds none."""
    sequence = sequence_at(query_starts, place, num_sequences, CHUNK)
    begin, last = rows_of(query_starts, sequence)
    begin += (place - place_of(query_starts, sequence, CHUNK)) * CHUNK
    return begin, tl.minimum(begin + CHUNK, last)


@triton.jit
def decays_between(logs, CHUNK: tl.constexpr):
    """Return by what a state decays from each row of a chunk (second dimension) to each later one or itself (first);
    0 for earlier ones. logs (CHUNK,): the logarithm of the decay in each row.

    Each pair is a sum of its own: the difference of two sums from the first row on would round as those do.
    """
    rows = tl.arange(0, CHUNK)
    later = rows[:, None] > rows[None, :]
    sums = tl.cumsum(tl.where(later, tl.broadcast_to(logs[:, None], (CHUNK, CHUNK)), 0.0), 0)
    return tl.where(rows[:, None] >= rows[None, :], exponential(sums), 0.0)
