"""Work that runs beside that of the current stream, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

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


class Copies:
    """Copies beside the work of the current stream, on another, in the order in which they are given.

    In a `with` block, at whose end the current stream goes on after all of them. On a GPU its copy engines make them,
    to and from other GPUs too, and need no multiprocessor for it: products that fill all of these do not hold copies
    up. So no kernel belongs on this stream. The caller holds the tensors until the block has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = self._other = None
        if device.type == "cuda":
            self._main, self._other = torch.cuda.current_stream(device), beside(device)

    def __enter__(self) -> Copies:
        return self

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy, after what the current stream was given so far; return what makes it wait for the copy."""
        if self._main is None or self._other is None:
            target.copy_(source)
            return lambda: None
        main, other = self._main, self._other
        other.wait_stream(main)
        with torch.cuda.stream(other):
            target.copy_(source)
        done = other.record_event()

        def wait() -> None:
            main.wait_event(done)
            launching.order_fully(main.cuda_stream)

        return wait

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._main is not None and self._other is not None:
            self._main.wait_stream(self._other)
            launching.order_fully(self._main.cuda_stream)
