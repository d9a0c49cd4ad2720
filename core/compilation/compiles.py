"""Counting what compilers of kernels do: those of Triton and of Inductor, where they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class KernelCount:
    """How many kernels were compiled so far; those found compiled on disk are not counted."""

    triton: int = 0
    inductor: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.triton + self.inductor


@contextmanager
def counting_kernels() -> Iterator[KernelCount]:
    """Count the kernels that are compiled in the block; the count is whole when it has ended.

    Triton: by its listener, which also hears of kernels that it finds on disk. Inductor: graphs that its own cache did
    not have, each of which it compiles as a whole. A compiler that is loaded within the block is counted from then on.
    """
    count, before = KernelCount(), _inductor_misses()
    knobs: Any = getattr(sys.modules.get("triton"), "knobs", None)
    previous = knobs.compilation.listener if knobs is not None else None

    def hear(**event: Any) -> None:
        count.triton += not event.get("cache_hit", False)
        if previous is not None:
            previous(**event)

    if knobs is not None:
        knobs.compilation.listener = hear
    try:
        yield count
    finally:
        if knobs is not None:
            knobs.compilation.listener = previous
        count.inductor = _inductor_misses() - before


def _inductor_misses() -> int:
    """Return how many graphs Inductor has compiled in this process rather than found; 0 where it is not loaded."""
    if "torch._inductor" not in sys.modules:
        return 0
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    counters = dynamo.counters["inductor"] if dynamo is not None else {}
    return int(counters.get("fxgraph_cache_miss", 0) + counters.get("fxgraph_cache_bypass", 0))
