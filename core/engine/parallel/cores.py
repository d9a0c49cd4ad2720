"""Divides the cores of a machine among the ranks that run on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from core.common.number_runs import runs_text

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


def divide(cores: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Return the numbers of the processors that each of `count` ranks gets, disjoint and in order.

    cores: the processors of each core, neighbours first; the processors of a core stay together. With fewer cores than
    ranks nobody gets any.
    """
    if len(cores) < count:
        return [()] * count
    bounds = [len(cores) * rank // count for rank in range(count + 1)]
    parts = (cores[first:last] for first, last in pairwise(bounds))
    return [tuple(number for core in part for number in core) for part in parts]


def own_cores(topology: str = _TOPOLOGY) -> list[tuple[int, ...]]:
    """Return the processors of each core that this process may use, cores of one socket next to each other."""
    found: dict[tuple[int, int], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        folder = Path(topology.format(number))
        try:
            place = tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):  # some virtual machines and containers hide it
            place = (0, -1 - number)
        found.setdefault((place[0], place[1]), []).append(number)
    return [tuple(numbers) for _, numbers in sorted(found.items(), key=lambda item: (item[0][0], item[1]))]


def pin(index: int, count: int) -> str:
    """Give this process its part of the cores and as many threads, and return what was done as a phrase.

    index: this process's number among the `count` ranks of the machine. Threads that were started before stay where
    they are.
    """
    cores = own_cores()
    mine = divide(cores, count)[index]
    if not mine:
        torch.set_num_threads(1)
        return f"not pinned: {len(cores)} cores for {count} ranks, one thread each"
    os.sched_setaffinity(0, mine)
    num_threads = min(torch.get_num_threads(), sum(set(core) <= set(mine) for core in cores))
    torch.set_num_threads(num_threads)
    processors = f"processor{'s' if len(mine) > 1 else ''} {runs_text(mine)}"
    return f"pinned, this one to {processors} with {num_threads} thread{'s' if num_threads > 1 else ''}"
