"""`GraphBackend` on CUDA graphs: all graphs of a program share one memory pool and one capture stream."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from core.common.graphs.backend import BoundCallable, Callback, GraphKey
from core.errors import CaptureError

_NUM_WARMUP_RUNS = 3

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture broke; see `CUDAGraphBackend._abandon`."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[torch.Tensor, ...]


class CUDAGraphBackend:
    """Captures each key into a `torch.cuda.CUDAGraph`.

    Graphs of one pool reuse each other's intermediate memory, so replays must not overlap in time; the outputs are kept
    alive and therefore keep their addresses. What a key returned is valid until that key is replayed again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[GraphKey, _Captured] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Make the side stream of the captures current, ordered after and before the caller's work."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            caller = torch.cuda.current_stream()
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                caller.wait_stream(self._stream)
                self._stream = None

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Run `fn` three times, call `after_warmup`, capture `fn` and return its static outputs."""
        if self._stream is None:
            raise CaptureError(
                f"capture of {key}",
                found="no capture session is open",
                remedy="call capture_one inside `with backend.capture_session():`",
            )
        # The first calls choose kernels and allocate the workspaces of libraries; a capture may contain neither.
        for _ in range(_NUM_WARMUP_RUNS):
            fn()
        after_warmup()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        self._graphs[key] = _Captured(graph, self._record(graph, fn))
        return self._graphs[key].outputs

    def _record(self, graph: torch.cuda.CUDAGraph, fn: BoundCallable) -> tuple[torch.Tensor, ...]:
        # "thread_local": another thread (a tokenizer, a data loader) may allocate without ruining this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = fn()
        except BaseException:
            self._abandon(graph)
            raise
        graph.capture_end()
        return outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a broken capture, so that stream, pool and allocator work again; the error under way tells the cause."""
        try:
            with warnings.catch_warnings(action="ignore"):  # that it is empty: it broke at its start
                graph.capture_end()
        except RuntimeError:
            # capture_end raised the driver's "capture invalidated" before it told torch's allocators. The device's is
            # told here, or it would keep every freed block from now on; a torch that told it finds nothing to end. The
            # one for pinned memory cannot be told and keeps a callback into the graph, so the graph stays.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                torch._C._cuda_releasePool(self._device.index, self._pool)
            _BROKEN.append(graph)
        # Either allocator may refuse the old pool from here on: one still records to it, or its last user is gone.
        self._pool = torch.cuda.graph_pool_handle()

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
        # A graph that still runs must not lose its memory; and graphs go before collectives are torn down.
        torch.cuda.synchronize(self._device)
        graphs = [captured.graph for captured in self._graphs.values()]
        # First the outputs: what still refers to one of them keeps the whole pool.
        self._graphs.clear()
        for graph in graphs:
            graph.reset()
        self._pool = None
        torch.cuda.empty_cache()
