"""Kernels that break the rule of `core_cuda/ops/launching.py`, each in one way, for compile_cuda_kernels.py."""

# Triton reads annotations of kernels as types of its own
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from core_cuda.ops import launching
from core_cuda.ops.launching import Early, fetch, start_next, wait_for_inputs

READ_EARLY = {
    name: {
        "weight": Early("a weight"),
        "guess": Early("decides what is fetched", guess=True),
        "settled": Early("what the kernel before has waited for", after="right"),
    }
    for name in ("right", "uses_a_guess", "reads_by_the_first_cache", "follows_another")
}
READ_EARLY |= {
    name: {"guess": Early("decides what is read", guess=True, confirmed=True)}
    for name in ("confirms_a_guess", "keeps_a_guess")
}


@triton.jit
def right(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Break no rule: read a weight, fetch by a guess that is made again, wait once on every way."""
    at = tl.program_id(0)
    factor = tl.load(weight + at)
    if OVERLAP:
        fetch(x + tl.load(guess + at, cache_modifier=".cg"))
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if at < N:
        tl.store(out + at, tl.load(x + tl.load(guess + at)) * factor + tl.load(pair[1] + at))


@triton.jit
def stores_early(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Clear the result, which an earlier kernel may still read."""
    at = tl.program_id(0)
    if at < N:
        tl.store(out + at, 0.0)
    wait_for_inputs(OVERLAP)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def counts_early(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Count an arrival."""
    tl.atomic_add(out + tl.program_id(0), 1.0)
    wait_for_inputs(OVERLAP)


@triton.jit
def returns_early(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Leave programs without work before they have waited."""
    at = tl.program_id(0)
    if at >= N:
        return
    wait_for_inputs(OVERLAP)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def waits_on_one_side(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Wait in the first programs only."""
    at = tl.program_id(0)
    if at < N:
        wait_for_inputs(OVERLAP)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def never_waits(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Do nothing: the kernel after this one then waits for nothing."""


@triton.jit
def starts_early(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Let the next kernel start before the wait."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


@triton.jit
def reads_early(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Read an activation of a tuple."""
    at = tl.program_id(0)
    value = tl.load(pair[1] + at)
    wait_for_inputs(OVERLAP)
    tl.store(out + at, value)


@triton.jit
def uses_a_guess(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Take a guess for the truth."""
    at = tl.program_id(0)
    place = tl.load(guess + at, cache_modifier=".cg")
    wait_for_inputs(OVERLAP)
    tl.store(out + at, tl.load(x + place))


@triton.jit
def confirms_a_guess(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Compute a place by a guess, and again only if that was wrong."""
    at = tl.program_id(0)
    guessed = tl.load(guess + at, cache_modifier=".cg")
    place = guessed // 7
    wait_for_inputs(OVERLAP)
    now = tl.load(guess + at)
    if now != guessed:
        place = now // 7
    tl.store(out + at, tl.load(x + place))


@triton.jit
def keeps_a_guess(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Say that a guess is confirmed, and read again without a comparison."""
    at = tl.program_id(0)
    place = tl.load(guess + at, cache_modifier=".cg") // 7
    wait_for_inputs(OVERLAP)
    tl.store(out + at, tl.load(x + place) + tl.load(guess + at))


@triton.jit
def reads_by_the_first_cache(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Make a guess of which the L1 cache keeps a copy."""
    at = tl.program_id(0)
    if OVERLAP:
        fetch(x + tl.load(guess + at))
    wait_for_inputs(OVERLAP)
    tl.store(out + at, tl.load(x + tl.load(guess + at)))


@triton.jit
def follows_another(x, none, weight, pair, guess, settled, out, N, OVERLAP: tl.constexpr):
    """Read what `right` has waited for."""
    at = tl.program_id(0)
    value = tl.load(settled + at, cache_modifier=".cg")
    wait_for_inputs(OVERLAP)
    tl.store(out + at, value)


KERNELS = (right, stores_early, counts_early, returns_early, waits_on_one_side, never_waits, starts_early, reads_early)
GUESSES = (uses_a_guess, confirms_a_guess, keeps_a_guess, reads_by_the_first_cache)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a launch of each; of the last both after the right kernel and after another."""
    x, places = torch.empty(64), torch.empty(64, dtype=torch.int64)

    def launched(kernel: Any) -> Callable[[], object]:
        # None, 1 and tuples change which parameter of the compiled kernel is which argument.
        return partial(launching.launch, kernel, (64,), x, None, x, (x, x), places, x, torch.empty(64), 63)

    for kernel in (*KERNELS, *GUESSES, right, follows_another):
        yield kernel.__name__, launched(kernel)
    yield "follows_another, wrongly", launched(follows_another)
