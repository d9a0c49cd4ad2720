"""`GraphBackend` for devices that capture a stream: all graphs of a program share one memory pool and one stream."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from core.common.graphs.backend import BoundCallable, Callback, GraphKey
from core.common.graphs.weak import release
from core.errors import CaptureError

FIRST_GRAPH_WARMUPS, LATER_GRAPH_WARMUPS = 3, 1
"""Number of warm-up runs before a graph is captured. The runs before a program's first graph also allocate the
workspaces of libraries, which must not happen inside a capture; later ones only choose kernels for their sizes."""

_CAPTURING: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)
"""Held during a capture and while a device is synchronised: synchronising all streams breaks every capture on them,
even in other threads."""


def capture_lock(device: torch.device) -> threading.RLock:
    """Return the lock to hold while a device is synchronised, so that no thread's capture breaks."""
    return _CAPTURING[device]


class StreamGraph(Protocol):
    """One captured graph, with the interface of torch's own graph classes."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        ...

    def reset(self) -> None:
        """Drop the graph and let go of its pool."""
        ...


class StreamGraphs(Protocol):
    """What differs between devices that capture streams. torch_device: where the graphs allocate."""

    torch_device: torch.device

    def new_pool(self) -> Any:
        """Return a handle of a new memory pool."""
        ...

    def capture_stream(self) -> AbstractContextManager[None]:
        """Make this program's side stream current, ordered after and before the caller's work.

        Libraries keep a workspace per stream, whose address ends up in graphs: programs must not share a stream, since
        their replays may overlap, and a stream for each session would leave a workspace behind each time.
        """
        ...

    def begin(self, pool: Any) -> StreamGraph:
        """Begin to capture the current stream into a new graph, whose memory comes from the pool."""
        ...

    def end(self, graph: Any) -> None:
        """End the capture; a graph without any work is no error."""
        ...

    def abandon(self, graph: Any, pool: Any) -> None:
        """End a broken capture, so that stream and allocator work again; the pool is not used any more."""
        ...

    def synchronize(self) -> None:
        """Block until all work queued on the device is done."""
        ...

    def release(self) -> None:
        """Give back the stream, for the next program, and unused cached memory to the device."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: StreamGraph
    outputs: tuple[torch.Tensor, ...] = ()


class StreamGraphBackend:
    """Captures each key, or each part of one, into a graph of the device.

    Graphs of one pool reuse each other's memory, outputs included: replays must not overlap in time, and what a replay
    returned is valid until the next one of any key. Outputs are held weakly (`weak.release`): memory per program is
    that of its largest graph, not of all together.
    """

    def __init__(self, graphs: StreamGraphs) -> None:
        self._device = graphs
        self._graphs: dict[GraphKey, _Captured] = {}
        self._pool: Any = None
        self._in_session = False

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Make the stream of the captures current, ordered after and before the caller's work.

        Other threads' captures on the same device wait until this session ends.
        """
        if self._pool is None:
            self._pool = self._device.new_pool()
        with _CAPTURING[self._device.torch_device], self._device.capture_stream():
            self._in_session = True
            try:
                yield
            finally:
                self._in_session = False

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Run `fn` to warm up, call `after_warmup`, capture `fn` and return its static outputs."""
        self._require_session(key)
        # The first calls choose kernels and allocate the workspaces of libraries; a capture may contain neither.
        for _ in range(LATER_GRAPH_WARMUPS if self._graphs else FIRST_GRAPH_WARMUPS):
            fn()
        after_warmup()
        self._device.synchronize()
        with self.segment(key):
            outputs = list(fn())
        captured = _Captured(self._graphs[key].graph, tuple(release(outputs, self._device.torch_device)))
        self._graphs[key] = captured
        return captured.outputs

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        """Capture the work of the block; an exception abandons the capture and leaves the device usable."""
        self._require_session(key)
        try:
            graph = self._device.begin(self._pool)
        except BaseException:
            self._pool = self._device.new_pool()  # the allocator may no longer accept the old pool
            raise
        try:
            yield
            self._device.end(graph)
        except BaseException:
            # From here on the allocator may refuse the old pool: it may still record into it, or the pool's last user
            # may be gone.
            pool, self._pool = self._pool, self._device.new_pool()
            self._device.abandon(graph, pool)
            raise
        self._graphs[key] = _Captured(graph)

    def can_run(self, key: GraphKey) -> bool:
        """Return whether `key` was captured."""
        return key in self._graphs

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        """Launch the graph of `key` on the current stream and return its static outputs."""
        captured = self._graphs[key]
        captured.graph.replay()
        return captured.outputs

    def replay_session(self) -> AbstractContextManager[None]:
        """Need nothing around replays."""
        return nullcontext()

    def cleanup(self) -> None:
        """Drop all graphs and give their pool's memory back to the device."""
        with _CAPTURING[self._device.torch_device]:
            # A graph that still runs must not lose its memory; and graphs go before collectives are torn down.
            self._device.synchronize()
            graphs = [captured.graph for captured in self._graphs.values()]
            # Drop the outputs first: a reference to one of them keeps the whole pool alive.
            self._graphs.clear()
            for graph in graphs:
                graph.reset()
            self._pool = None
            self._device.release()

    def _require_session(self, key: GraphKey) -> None:
        if not self._in_session:
            raise CaptureError(
                f"capture of {key}",
                found="no capture session is open",
                remedy="capture inside `with backend.capture_session():`",
            )
