"""The kernels of `core::sample`: inversion of each row's cumulative distribution without sorting the vocabulary.

Every cut (top-k, top-p, the draw) ends at one token of the row in order of falling logit: the first at which a running
sum, of ones or of probabilities, exceeds a number. So that token is searched as in radix selection (Alabi et al., Fast
K-Selection Algorithms for Graphics Processing Units, 2012): a histogram over the logits' distance from the largest one
says in which bin it lies, and only what is in there is sorted. Bins are monotone in the logits, whatever the rounding.

Probabilities are counted as integers, in units of 2**-40 of the largest one: sums of any order are equal, and so one
row gives one token. What is over `SPAN` temperatures below the largest logit has a probability of zero: of 2**17 such
tokens together less than 1e-7.

Legend: R rows, V vocabulary, P parts into which a row is divided, a key is a logit as an integer of the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.sampling.ranks import id_in, packed, rank_of, value_of

SPAN = tl.constexpr(28.0)
_UNIT = tl.constexpr(1099511627776.0)  # 2**40
_LEAST = tl.constexpr(-(2**31))
_MOST = tl.constexpr(2**31 - 1)


@triton.jit
def _frame(bests, lows, row, num_parts, temperature, PARTS: tl.constexpr, BINS: tl.constexpr):
    """Return the best token of a row, packed, its logit, the distance that bins cover, and bins per distance."""
    part = tl.arange(0, PARTS)
    at = row * num_parts + part
    best = tl.max(tl.load(bests + at, mask=part < num_parts, other=-(2**63)), axis=0)
    low = tl.min(tl.load(lows + at, mask=part < num_parts, other=float("inf")), axis=0)
    top = value_of((best >> 32).to(tl.int32))
    # A distance that overflows is infinite, and its probability zero.
    span = tl.minimum(tl.minimum(top - low, temperature * SPAN), 3.4e38)
    # Distances of less than that would overflow their inverse; they share one bin.
    per_unit = tl.where(span > 1e-30, (1.0 / tl.where(span > 1e-30, span, 1.0)) * BINS, 0.0)
    return best, top, span, per_unit


@triton.jit
def _bin(values, top, span, per_unit, BINS: tl.constexpr):
    """Return the bin of each value, BINS for what has a probability of zero."""
    distance = top - values
    inside = distance <= span
    number = tl.where(inside, distance * per_unit, 0.0).to(tl.int32)
    return tl.where(inside, tl.minimum(tl.maximum(number, 0), BINS - 1), BINS)


@triton.jit
def _mass(values, top, temperature):
    """Return the probability of each value over that of `top`, int64, in units of 2**-40."""
    return (tl.exp((values - top) / temperature) * _UNIT).to(tl.int64)


@triton.jit
def bounds_kernel(
    logits, settings, bests, lows, counts, masses, V, stride, num_parts, PART: tl.constexpr, BINS: tl.constexpr,
    CLEARED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the best token and the lowest finite logit of each part of each row, and clear the histograms.

    logits (R, V); settings (R, 4); bests int64, lows fp32 (R, P); counts int32, masses int64 (R, BINS).
    """
    row = tl.program_id(0) // num_parts
    part = tl.program_id(0) % num_parts
    ids = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    pairs = packed(tl.where(ids < V, rank_of(values), _LEAST), ids)
    tl.store(bests + tl.program_id(0), tl.max(pairs, axis=0))
    tl.store(lows + tl.program_id(0), tl.min(tl.where(values > float("-inf"), values, float("inf")), axis=0))
    if tl.load(settings + row * 4) > 0.0:
        bins = part * CLEARED + tl.arange(0, CLEARED)
        at = row * BINS + bins
        tl.store(counts + at, tl.zeros((CLEARED,), tl.int32), mask=bins < BINS)
        tl.store(masses + at, tl.zeros((CLEARED,), tl.int64), mask=bins < BINS)


@triton.jit
def histogram_kernel(
    logits, settings, bests, lows, counts, masses, V, stride, num_parts, PART: tl.constexpr, PARTS: tl.constexpr,
    BINS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Count the tokens of each bin and sum up their probabilities; arguments as for `bounds_kernel`."""
    row = tl.program_id(0) // num_parts
    ids = (tl.program_id(0) % num_parts) * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    temperature = tl.load(settings + row * 4)
    if temperature > 0.0:
        values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        _, top, span, per_unit = _frame(bests, lows, row, num_parts, temperature, PARTS, BINS)
        bins = _bin(values, top, span, per_unit, BINS)
        inside = bins < BINS
        mass = _mass(tl.where(inside, values, top), top, temperature)
        # In this order: the other one is more than the layout pass of Triton 3.6 can compile.
        tl.atomic_add(masses + row * BINS + bins, mass, mask=inside & (mass > 0), sem="relaxed")
        tl.atomic_add(counts + row * BINS + bins, tl.full((PART,), 1, tl.int32), mask=inside, sem="relaxed")


@triton.jit
def _chunk(row_logits, start, V, top, span, per_unit, first, last, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Return values, keys and ids of some tokens of a row, and which of them lie in bins first to last."""
    ids = start + tl.arange(0, CHUNK)
    values = tl.load(row_logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    bins = _bin(values, top, span, per_unit, BINS)
    return values, rank_of(values), ids, (bins >= first) & (bins <= last) & (bins < BINS)


@triton.jit
def _narrowed(
    row_logits, V, top, span, per_unit, temperature, bin, count, ahead, ahead_mass, target, by_count,
    CHUNK: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Bisect the keys of a bin that holds too many tokens to be listed, until LISTED are left, or equal ones.

    ahead, ahead_mass: what the running sum and the probabilities come to before the bin. Returns the lowest and the
    highest key left, how many of the lowest ids to skip, the count left, and what is ahead of these then.
    """
    low = tl.full((), _MOST, tl.int32)
    high = tl.full((), _LEAST, tl.int32)
    for start in range(0, V, CHUNK):
        _, keys, _, match = _chunk(row_logits, start, V, top, span, per_unit, bin, bin, CHUNK, BINS)
        low = tl.minimum(low, tl.min(tl.where(match, keys, _MOST), axis=0))
        high = tl.maximum(high, tl.max(tl.where(match, keys, _LEAST), axis=0))
    while (count > LISTED) & (low < high):
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        above = tl.full((), 0, tl.int32)
        above_mass = tl.full((), 0, tl.int64)
        for start in range(0, V, CHUNK):
            values, keys, _, match = _chunk(row_logits, start, V, top, span, per_unit, bin, bin, CHUNK, BINS)
            match = match & (keys > middle) & (keys <= high)
            above += tl.sum(match.to(tl.int32), axis=0)
            mass = _mass(tl.where(match, values, top), top, temperature)
            above_mass += tl.sum(tl.where(match, mass, 0), axis=0)
        weight = tl.where(by_count, above.to(tl.int64), above_mass)
        upper = ahead + weight > target
        low = tl.where(upper, middle + 1, low)
        high = tl.where(upper, high, middle)
        count = tl.where(upper, above, count - above)
        ahead = tl.where(upper, ahead, ahead + weight)
        ahead_mass = tl.where(upper, ahead_mass, ahead_mass + above_mass)
    mass = _mass(value_of(high), top, temperature)
    weight = tl.where(by_count, 1, tl.maximum(mass, 1))
    skipped = tl.where(low == high, (target - ahead) // weight, 0)
    count -= skipped.to(tl.int32)
    return low, high, skipped.to(tl.int32), count, ahead + skipped * weight, ahead_mass + skipped * mass


@triton.jit
def _listed(
    row_logits, listing, V, top, span, per_unit, first, last, low, high, skipped, CHUNK: tl.constexpr,
    BINS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return the tokens of some bins with keys from low to high, packed, sorted, by way of `listing` (LISTED,)."""
    tl.debug_barrier()  # an earlier list has been read
    found = -skipped
    for start in range(0, V, CHUNK):
        _, keys, ids, match = _chunk(row_logits, start, V, top, span, per_unit, first, last, CHUNK, BINS)
        match = match & (keys >= low) & (keys <= high)
        number = tl.sum(match.to(tl.int32), axis=0)
        if number > 0:
            place = found + tl.cumsum(match.to(tl.int32), axis=0) - 1
            tl.store(listing + place, packed(keys, ids), mask=match & (place >= 0) & (place < LISTED))
        found += number
    tl.debug_barrier()
    place = tl.arange(0, LISTED)
    return tl.sort(tl.load(listing + place, mask=place < found, other=-(2**63)), descending=True)


@triton.jit
def _at(values, places, place):
    """Return the value at a place, 0 where there is no such place."""
    return tl.sum(tl.where(places == place, values, 0), axis=0)


@triton.jit
def _target(step, top_k, top_p, uniform, total, kept):
    """Return what the running sum has to exceed in a step, and whether there is anything to do in it."""
    share = tl.where(step == 1, top_p, uniform).to(tl.float64) * kept.to(tl.float64)
    floor = share.to(tl.int64)
    # Top-p ends at the token that reaches its share, the draw at the one that exceeds it.
    reached = tl.where(floor.to(tl.float64) == share, tl.maximum(floor, 1) - 1, floor)
    target = tl.where(step == 1, reached, tl.minimum(floor, kept - 1))
    limit = tl.minimum(top_k, total.to(tl.float32)).to(tl.int64)
    limit += (limit.to(tl.float32) < tl.minimum(top_k, total.to(tl.float32))).to(tl.int64)
    limited = (top_k > 0.0) & (limit < total)
    active = tl.where(step == 0, limited, tl.where(step == 1, top_p < 1.0, True)) & (kept > 0)
    return tl.where(step == 0, limit - 1, target), active


@triton.jit
def choose_kernel(
    logits, settings, bests, lows, counts, masses, listings, tokens, V, stride, num_parts, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr, LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row: cut at top-k, then at top-p, then where the draw lies. tokens (R,) int64."""
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    listing = listings + row * LISTED
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    temperature = tl.load(settings + row * 4)
    top_k = tl.load(settings + row * 4 + 1)
    top_p = tl.load(settings + row * 4 + 2)
    uniform = tl.load(settings + row * 4 + 3)
    best, top, span, per_unit = _frame(bests, lows, row, num_parts, temperature, PARTS, BINS)
    token = id_in(best)
    if temperature > 0.0:
        bins = tl.arange(0, BINS)
        place = tl.arange(0, LISTED)
        counted = tl.cumsum(tl.load(counts + row * BINS + bins), axis=0)
        massed = tl.cumsum(tl.load(masses + row * BINS + bins), axis=0)
        total = _at(counted, bins, BINS - 1)
        kept = _at(massed, bins, BINS - 1)
        # The first bins as far as all of them can be listed: with peaked distributions every cut lies there.
        near = tl.sum((counted <= LISTED).to(tl.int32), axis=0)
        listed = tl.full((LISTED,), -(2**63), tl.int64)
        held = tl.full((), -1, tl.int32)
        for step in range(3):
            target, active = _target(step, top_k, top_p, uniform, total, kept)
            if active:
                by_count = step == 0
                running = tl.where(by_count, counted.to(tl.int64), massed)
                bin = tl.minimum(tl.sum((running <= target).to(tl.int32), axis=0), BINS - 1)
                first = tl.where(bin < near, 0, bin)
                last = tl.where(bin < near, near - 1, bin)
                ahead_count = _at(counted, bins, first - 1)
                ahead_mass = _at(massed, bins, first - 1)
                ahead = tl.where(by_count, ahead_count.to(tl.int64), ahead_mass)
                number = _at(counted, bins, last) - ahead_count
                if (first != held) | (number > LISTED):
                    low = tl.full((), _LEAST, tl.int32)
                    high = tl.full((), _MOST, tl.int32)
                    skipped = tl.full((), 0, tl.int32)
                    if number > LISTED:
                        low, high, skipped, number, ahead, ahead_mass = _narrowed(
                            row_logits, V, top, span, per_unit, temperature, bin, number, ahead, ahead_mass, target,
                            by_count, CHUNK, BINS, LISTED,
                        )  # fmt: skip
                    listed = _listed(
                        row_logits,
                        listing,
                        V,
                        top,
                        span,
                        per_unit,
                        first,
                        last,
                        low,
                        high,
                        skipped,
                        CHUNK,
                        BINS,
                        LISTED,
                    )
                    held = first
                real = listed != -(2**63)
                own = tl.where(
                    real, _mass(tl.where(real, value_of((listed >> 32).to(tl.int32)), top), top, temperature), 0
                )
                sums = ahead + tl.cumsum(tl.where(by_count, real.to(tl.int64), own), axis=0)
                index = tl.minimum(tl.sum((sums <= target).to(tl.int32), axis=0), tl.sum(real.to(tl.int32), axis=0) - 1)
                kept = ahead_mass + tl.sum(tl.where(place <= index, own, 0), axis=0)
                token = tl.sum(tl.where(place == index, listed & _MOST, 0), axis=0).to(tl.int32) ^ _MOST
    tl.store(tokens + row, tl.minimum(tl.maximum(token, 0), V - 1).to(tl.int64))
