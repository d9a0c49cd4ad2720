"""Measures how fast this process reads memory: the rate by which `core bench` computes the least time of a step."""

from __future__ import annotations

import time

import torch

_BYTES = 512 * 2**20  # far more than the caches of a processor hold
_REPEATS = 7


def read_rates() -> dict[int, float]:
    """Return bytes per second by number of threads: of one thread, and of all that torch uses here.

    An inner product of two vectors reads each number once and writes none. The best of several runs counts.
    """
    left, right = torch.ones(2, _BYTES // 8, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        return {count: _rate(left, right, count) for count in sorted({1, threads})}
    finally:
        torch.set_num_threads(threads)


def _rate(left: torch.Tensor, right: torch.Tensor, threads: int) -> float:
    torch.set_num_threads(threads)
    torch.dot(left, right)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.dot(left, right)
        times.append(time.perf_counter() - start)
    return (left.nbytes + right.nbytes) / min(times)
