"""Which program of decode's attention serves which share of which sequence, computed anew from the lengths of a step.

The lengths lie in device memory and the grid of a captured graph is fixed, so every program computes the plan for
itself. It is counted in units of one tile of cached positions. A key/value head has one program for each sequence and
HELPERS more. A share is the work of all sequences over the number of helpers, within a quarter: a sequence that is
longer has more programs, and all of its shares have one size. So no program goes on to a second sequence, equal lengths
are cut alike, and uneven ones into shares of about one size.

Joining the shares of a sequence is the work of one program. So there are no more of them than make what that one reads
of the others as large as a share: with n tiles in c shares, c parts are as large as n / c tiles for c = sqrt(n * r),
where r is the size of a tile over that of a part.
"""

# Triton reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.attention.online_softmax import first_seen

UNITS_OF_NEW = tl.constexpr(2)
"""What the new tokens of a sequence count in the plan: they are read, rotated and written in about two tiles' time."""


@triton.jit
def read_lengths(seq_lens, query_starts, seqs, num_seqs, CACHING: tl.constexpr):
    """Return the first new tokens of sequences, the ones after their last, and their lengths; zeros beyond num_seqs."""
    there = seqs < num_seqs
    first = tl.load(query_starts + seqs, mask=there, other=0, cache_modifier=CACHING).to(tl.int32)
    last = tl.load(query_starts + seqs + 1, mask=there, other=0, cache_modifier=CACHING).to(tl.int32)
    return first, last, tl.load(seq_lens + seqs, mask=there, other=0, cache_modifier=CACHING).to(tl.int32)


@triton.jit
def extent(first, last, length, window, MAX_NEW: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
           AMONG_PROMPTS: tl.constexpr):  # fmt: skip
    """Return how many new tokens and cached positions sequences have, and the first of the latter that is seen.

    A prompt has no new token for this kernel.
    """
    num_new = tl.minimum(last - first, MAX_NEW)
    if AMONG_PROMPTS:
        num_new = tl.where(last - first > MAX_NEW, 0, num_new)
    num_old = tl.maximum(length - num_new, 0)
    begin = tl.zeros_like(num_old)
    if WINDOWED:
        begin = tl.maximum(first_seen(num_old, window, CHUNKED), 0)
    return num_new, num_old, begin


@triton.jit
def planned(first, last, length, program, num_seqs, window, helpers, join_ratio, MAX_NEW: tl.constexpr,
            WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, AMONG_PROMPTS: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_B: tl.constexpr):  # fmt: skip
    """Return what a program of a key/value head serves: (sequence, share, number of its shares, positions of a share,
    parts of earlier sequences).

    first, last, length (BLOCK_B,): as `read_lengths` returns them. The sequence is num_seqs for a program that has
    nothing to do. Parts are the shares of sequences that have several: at most `MOST_PARTS` for each helper.
    """
    num_new, num_old, begin = extent(first, last, length, window, MAX_NEW, WINDOWED, CHUNKED, AMONG_PROMPTS)
    units = tl.where(num_new > 0, tl.cdiv(num_old - begin, BLOCK_N) + UNITS_OF_NEW, 0)
    fair = tl.maximum(tl.cdiv(tl.sum(units, 0), helpers), 1)
    most = tl.sqrt_rn(units.to(tl.float32) * join_ratio).to(tl.int32)
    cut = tl.maximum(tl.minimum((4 * units + 3 * fair) // (4 * fair), most), 1)
    size = tl.maximum(tl.cdiv(units, cut), 1)
    shares = tl.cdiv(units, size)
    ends = tl.cumsum(shares, 0)
    before = ends <= program
    seq = tl.sum(before.to(tl.int32), 0)
    parts = tl.sum(tl.where(before & (shares > 1), shares, 0), 0)
    own = tl.arange(0, BLOCK_B) == seq
    num_shares, positions = tl.sum(tl.where(own, shares, 0), 0), tl.sum(tl.where(own, size, 0), 0) * BLOCK_N
    share = program - tl.sum(tl.where(before, shares, 0), 0)
    return tl.minimum(seq, num_seqs), share, num_shares, positions, parts


@triton.jit
def bounds(begin, num_old, share, size, SHARED: tl.constexpr):
    """Return the first cached position of a share and the one after its last; begin: the first that is seen."""
    if SHARED:
        start = begin + share * size
        return start, tl.minimum(start + size, num_old)
    else:
        return begin, num_old


MOST_PARTS = tl.constexpr(2)
"""A sequence is cut in two or more from 5/4 of the fair share on, into at most its units over that and 3/4: 8/5 of the
helpers at most, over all sequences."""
