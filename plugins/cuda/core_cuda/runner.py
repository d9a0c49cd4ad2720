"""CUDA graphs for `StreamGraphBackend`: `torch.cuda.CUDAGraph`, and the steps to end a broken capture."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from core.common.graphs.streams import StreamGraphBackend
from core_cuda import exchange
from core_cuda.streams import keep_workspaces

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture broke; see `CUDAGraphs.abandon`."""

_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Capture streams of closed programs, by GPU."""


def cuda_graph_backend(device: torch.device) -> StreamGraphBackend:
    """Return a backend that captures on this GPU."""
    return StreamGraphBackend(CUDAGraphs(device))


class CUDAGraphs:
    """`StreamGraphs` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._stream: torch.cuda.Stream | None = None

    def new_pool(self) -> Any:
        """Return a handle of a new memory pool."""
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Make the program's side stream current, ordered after and before the caller's work."""
        with torch.cuda.device(self.torch_device):
            caller = torch.cuda.current_stream()
            stream = self._stream = self._stream or _take_stream(self.torch_device)
            stream.wait_stream(caller)
            try:
                with torch.cuda.stream(stream):
                    keep_workspaces(stream)
                    yield
            finally:
                caller.wait_stream(stream)

    def begin(self, pool: Any) -> torch.cuda.CUDAGraph:
        """Begin to capture the current stream."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread (a tokenizer, a data loader) may allocate without ruining this capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture and instantiate the graph."""
        with warnings.catch_warnings():
            # Between two break points there may be nothing but the allocation of results.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()

    def abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a broken capture, so that stream, pool and allocator work again; the error under way tells the cause."""
        try:
            self.end(graph)
        except RuntimeError:
            # capture_end raised the driver's "capture invalidated" before it told torch's allocators. The device's is
            # told here, or it would keep every freed block from now on; a torch that told it finds nothing to end. The
            # one for pinned memory cannot be told and keeps a callback into the graph, so the graph stays.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.torch_device.index, pool)
                torch._C._cuda_releasePool(self.torch_device.index, pool)
            _BROKEN.append(graph)

    def synchronize(self) -> None:
        """Block until all work queued on the GPU is done."""
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """Give back the stream, for the next program, what GPUs shared for it, and unused cached memory."""
        stream, self._stream = self._stream, None
        if stream is not None:
            exchange.release(stream.cuda_stream)
            _STREAMS[stream.device].append(stream)
        torch.cuda.empty_cache()


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no program uses: cuBLAS keeps 32 MiB of workspace for each it has seen."""
    with suppress(IndexError):  # not asked first whether there is one: another thread may take it in between
        return _STREAMS[device].pop()
    return torch.cuda.Stream(device)
