"""How the scripts time kernels: calls in a CUDA graph, over enough memory that no call finds its data in the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from core import select_device
from core.bench.rates import measure_rates

MISSING_BYTES = 256 * 2**20
"""Bytes that calls go through before the same data comes again: several times the L2 cache."""
ROUNDS = 6
MOST_SETS = 64


def require_gpu() -> None:
    """End the script with what is missing, where there is no GPU to time anything on."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"error: timing kernels\n  found: torch {torch.__version__} sees no NVIDIA GPU\n"
            "  to do: run this where there is one, with a CUDA build of torch"
        )


def num_sets(num_bytes: int) -> int:
    """Return how many sets of data of this size calls should go through."""
    return max(2, min(MOST_SETS, -(-MISSING_BYTES // max(num_bytes, 1))))


def time_us(call: Callable[[Any], object], sets: Sequence[Any], *, rounds: int = ROUNDS) -> float:
    """Return the median microseconds of a call, from replays of a graph of one call per set of data."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for data in sets[:2]:  # compiles, and fills workspaces
            call(data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()  # not `torch.cuda.graph`, which empties caches each time
        try:
            for data in sets:
                call(data)
        finally:
            graph.capture_end()
        times = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(sets))
    return statistics.median(times[1:])


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted; NaN where there is one."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def copy_bandwidth() -> float:
    """Return bytes per second, read and written, of a large copy on the device, as `core bench` measures it."""
    # Not a replayed graph: a copy recorded in one runs at two thirds of this on an H200.
    return measure_rates(select_device("cuda"), torch.bfloat16).bytes_per_s
