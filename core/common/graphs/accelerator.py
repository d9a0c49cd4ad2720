"""Graphs by `torch.accelerator.Graph`, torch's own interface to every accelerator that registers a graph class.

torch has it from 2.13 on, but a device only if its backend registers a graph class. So it is tried before use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from core.common.graphs.backend import GraphKey
from core.common.graphs.streams import StreamGraphBackend


class AcceleratorGraphs:
    """`StreamGraphs` of torch's current accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._stream: torch.Stream | None = None

    def new_pool(self) -> Any:
        """Return no pool: the pool of the first graph becomes the program's."""
        return _Pool()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Make the program's stream current, ordered after and before the caller's work."""
        caller = torch.accelerator.current_stream(self.torch_device)
        stream = self._stream = self._stream or torch.Stream(self.torch_device)
        stream.wait_stream(caller)
        try:
            with stream:
                yield
        finally:
            caller.wait_stream(stream)

    def begin(self, pool: _Pool) -> Any:
        """Begin to capture the current stream."""
        graph = torch.accelerator.Graph(pool=pool.handle, capture_error_mode="thread_local")
        graph.capture_begin()
        if pool.handle is None:
            pool.handle = graph.pool()
        return graph

    def end(self, graph: Any) -> None:
        """End the capture."""
        graph.capture_end()

    def abandon(self, graph: Any, pool: _Pool) -> None:
        """End a broken capture."""
        with suppress(RuntimeError):
            graph.capture_end()
        graph.reset()

    def synchronize(self) -> None:
        """Block until all work queued on the device is done."""
        torch.accelerator.synchronize(self.torch_device)

    def release(self) -> None:
        """Return unused cached memory to the device."""
        torch.accelerator.empty_cache()


class _Pool:
    """The pool that a program's graphs share, once the first has made it."""

    handle: Any = None


def find_fault(device: torch.device) -> str:
    """Return why `torch.accelerator.Graph` can't be used for a device, or "" if a captured addition replays
    correctly."""
    if not hasattr(torch.accelerator, "Graph"):
        return f"torch {torch.__version__} has no torch.accelerator.Graph"
    if torch.accelerator.current_accelerator() is None:
        return "torch finds no accelerator"
    key = GraphKey("probe", ())
    try:
        x = torch.ones(4, device=device)
        backend = StreamGraphBackend(AcceleratorGraphs(device))
        with backend.capture_session():
            (y,) = backend.capture_one(key, lambda: (x + 1,), {"x": x}, lambda: None)
        for value in (2.0, 5.0):
            x.fill_(value)
            backend.replay(key)
            if y.tolist() != [value + 1] * 4:
                return f"a captured x + 1 gives {y.tolist()} for x = {value}"
        backend.cleanup()
    except Exception as error:  # whatever the device's code raises is the reason
        return f"{type(error).__name__}: {error}"
    return ""
