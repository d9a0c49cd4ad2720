"""Mistakes that chunks of recurrent prompts are tested against, each in the place of a function that kernels call."""

# Triton reads annotations of kernels as types of its own
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.recurrent.chunks import chunk_at
from core_cuda.ops.recurrent.states import rows_of, slot_of


@triton.jit
def slot_before(slots, sequence):
    """The slot of the sequence before, so that a sequence begins with another's state."""
    return slot_of(slots, tl.maximum(sequence - 1, 0))


@triton.jit
def rows_short(query_starts, sequence):
    """A sequence that begins a row late."""
    begin, last = rows_of(query_starts, sequence)
    return begin + 1, last


@triton.jit
def chunk_short(query_starts, place, num_sequences, CHUNK: tl.constexpr):
    """Chunks that end a row early."""
    begin, last = chunk_at(query_starts, place, num_sequences, CHUNK)
    return begin, tl.minimum(begin + CHUNK - 1, last)


@triton.jit
def nothing_cleared(out, first, query_starts, features, low, high, rows, num_sequences, HEADS, FEATURES, TILE):
    """Rows of padding that hold what was in memory."""
