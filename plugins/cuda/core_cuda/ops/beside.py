"""Work that runs beside that of the current stream, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from core_cuda.ops import launching
from core_cuda.streams import beside

_First = TypeVar("_First")
_Second = TypeVar("_Second")


def run_beside(
    device: torch.device, first: Callable[[], _First], second: Callable[[], _Second]
) -> tuple[_First, _Second]:
    """Run `first` on the current stream and `second` beside it, on another; return both results.

    The second stream begins after all that the current one was given before, and the current one goes on after both. In
    a capture this is a fork and a join of the graph.

    Why no memory is used twice at a time: the caller holds what `second` reads until this function has returned, and
    what it allocates belongs to its stream, whose next work begins after all that read it. Why no kernel starts too
    early: one that overlaps with the kernel before it waits for that kernel alone, so the first on either side of a
    join or fork does not overlap (`launching.order_fully`).
    """
    if device.type != "cuda":
        return first(), second()
    main, other = torch.cuda.current_stream(device), beside(device)
    other.wait_stream(main)
    launching.order_fully(other.cuda_stream)
    try:
        with torch.cuda.stream(other):
            made = second()
        return first(), made
    finally:
        main.wait_stream(other)
        launching.order_fully(main.cuda_stream)
