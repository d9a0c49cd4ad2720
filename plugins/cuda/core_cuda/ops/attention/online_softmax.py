"""Parts of attention's online softmax (Dao et al., arXiv 2205.14135), for the kernel of decode, and what all of
attention's kernels ask of windows.

Scores are powers of two: log2(e) is part of their scale.
"""

# Triton reads annotations as types of its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """Return the first position that the token at a position sees; below 0 where a window is not full yet."""
    if CHUNKED:
        return position // window * window
    else:
        return position - window + 1


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """Return `c * tanh(scores / c)` for c = SOFTCAP."""
    power = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / SOFTCAP))
    size = SOFTCAP * (1.0 - power) / (1.0 + power)
    return tl.where(scores < 0, -size, size)


@triton.jit
def narrowed(q, DTYPE: tl.constexpr):
    """Return rows (M, D) over powers of two (M,) fp32, and these, so that all but what is tiny beside a row's largest
    fits into fp16 exactly; rows with NaN or infinity keep NaN."""
    wide = q.to(tl.float32)
    # The exponent of the largest, as a number: no more than it, and more than half of it.
    sizes = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    sizes = tl.maximum(sizes, 7.888609052210118e-31)  # 2 ** -100: of rows of zeros
    return (wide / sizes[:, None]).to(DTYPE), sizes


@triton.jit
def absorbed(q, k, v, visible, top, total, acc, scale, SOFTCAP: tl.constexpr):
    """Take one tile of keys and values into (top, total, acc), the state of the online softmax.

    q (M, D), k (N, D), v (N, V), visible (M, N); scale: of the scores, one or (M, 1); top (M,) largest score so far,
    total (M,) sum of powers below it, acc (M, V) sum of values weighted by them.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = capped(scores, SOFTCAP) * LOG2_E
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # for a row that has seen no key yet
    powers = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(powers, 1)
    acc = tl.dot(powers.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def joined(places, stat_places, num_parts, num_rows, PARTS: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr,
           BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Return (top, total, acc) of all parts together, as `absorbed` has them; PARTS of them are read at a time."""
    rows, v = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_V)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    for start in range(0, num_parts, PARTS):
        parts = start + tl.arange(0, PARTS)
        there = (parts < num_parts)[:, None] & (rows < num_rows)[None, :]
        stats = stat_places + parts[:, None] * (2 * ROWS) + rows[None, :]
        # Other multiprocessors wrote them: ".cg" reads from the L2 cache, past this one's own.
        tops = tl.load(stats, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        tile = places + (parts[:, None] * ROWS + rows[None, :])[:, :, None] * V + v[None, None, :]
        accs = tl.load(tile, mask=there[:, :, None] & (v < V)[None, None, :], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, kept = tl.exp2(tops - base[None, :]), tl.exp2(top - base)
        total = total * kept + tl.sum(totals * weights, 0)
        acc = acc * kept[:, None] + tl.sum(accs * weights[:, :, None], 0)
        top = new_top
    return top, total, acc
