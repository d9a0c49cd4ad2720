"""NPU graphs for `StreamGraphBackend`, and the renewal of their host-side lists before each replay."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from core.common.graphs.backend import WHOLE, BoundCallable, Callback, GraphKey
from core.common.graphs.streams import StreamGraphBackend
from core.errors import CaptureError, GraphResourcesError
from core_npu.task_queue import TaskQueue, task_queue
from core_npu.update_tasks import GraphTasks, capturing

__all__ = ["NPUGraphBackend", "NPUGraphs"]

_EXHAUSTED = re.compile(r"\b(?:20700[5789]|207010)\b|Alloc sq cq fail|stream resources are insufficient", re.IGNORECASE)
"""Errors of the runtime when the resources of graphs are used up: mostly streams, of which a device has some 2000 and
every graph holds at least one. The codes are ACL's (no resource, events, streams, notifies, models); older drivers give
another code with the first text."""

_BROKEN: list[Any] = []
"""Graphs whose capture broke; see `NPUGraphs._let_go`."""


class NPUGraphs:
    """`StreamGraphs` of one NPU."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._stream: Any = None

    def new_pool(self) -> Any:
        """Return a handle of a new memory pool."""
        return _npu().graph_pool_handle()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Make the program's stream current, ordered after and before the caller's work."""
        npu = _npu()
        with npu.device(self.torch_device):
            caller = npu.current_stream()
            stream = self._stream = self._stream or npu.Stream(self.torch_device)
            stream.wait_stream(caller)
            try:
                with npu.stream(stream):
                    yield
            finally:
                caller.wait_stream(stream)

    def begin(self, pool: Any) -> Any:
        """Begin to capture the current stream."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # HCCL has streams of its own, and a capture may not take in a stream with work left.
            self.synchronize()
        graph = _npu().NPUGraph()
        # By keyword: the order of arguments differs from that of other devices' graphs. "thread_local": another thread
        # may allocate or copy without ruining this capture; under "global" it fails with 107030.
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except RuntimeError:
            self._let_go(graph, pool)  # the allocator records to the pool before the capture begins
            raise
        return graph

    def end(self, graph: Any) -> None:
        """End the capture."""
        graph.capture_end()

    def abandon(self, graph: Any, pool: Any) -> None:
        """End a broken capture, so that stream, pool and allocator work again; the error under way tells the cause."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._let_go(graph, pool)
        else:
            graph.reset()

    def _let_go(self, graph: Any, pool: Any) -> None:
        """Tell the device's allocator that a capture has ended, where its graph could not.

        Otherwise the allocator would ask the graph about every allocation, and keep the pool's memory for ever. The
        allocator of pinned memory can't be told and does ask, so the graph must stay alive.
        """
        import torch_npu

        with suppress(RuntimeError):  # the allocator already knows: the capture ended, but the graph could not be made
            torch_npu._C._npu_endAllocateToPool(self.torch_device.index, pool)
        with suppress(RuntimeError):  # the capture never got as far as the allocator
            torch_npu._C._npu_releasePool(self.torch_device.index, pool)
        _BROKEN.append(graph)

    def synchronize(self) -> None:
        """Block until all work queued on the NPU is done."""
        _npu().synchronize(self.torch_device)

    def release(self) -> None:
        """Return unused cached memory to the NPU."""
        _npu().empty_cache()


@dataclass(slots=True)
class _Renewed:
    """A graph with update tasks."""

    tasks: GraphTasks
    #: The event that marks the end of its last replay.
    done: Any
    #: Whether its lists have values for the next replay.
    ready: bool = False
    #: Whether it was replayed at all.
    replayed: bool = False


class NPUGraphBackend(StreamGraphBackend):
    """Captures each key, or each part of one, into an `NPUGraph`; renews the host-side lists of whole keys.

    A graph with such lists waits on the device for their renewal, so a replay that was not preceded by `update` would
    hang: it is refused, as is an update that does not fit. `update` waits for the previous replay, since the tasks of a
    running graph must not change; prepare a step's inputs on the host before it.

    Once torch_npu's task queue has ended, all of them raise `DeviceUnavailableError`: graphs would give old values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NPUGraphs(device))
        self._queue = task_queue(device)
        self._renewed: dict[GraphKey, _Renewed] = {}
        self._tasks: GraphTasks | None = None
        self._update_stream: Any = None

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Make the stream of the captures current; raises `CaptureError` where launches are queued in two steps."""
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            raise CaptureError(
                "capturing on an NPU with TASK_QUEUE_ENABLE=2",
                found="torch_npu then prepares launches in another thread, which a capture does not see",
                remedy="set TASK_QUEUE_ENABLE=1 (its default) before the process starts, or use mode 'off'",
            )
        with _typed("a capture session", self._queue):
            self._queue.check("a capture session")
            with super().capture_session():
                yield

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Warm `fn` up, capture it, and keep the tasks that its ops have registered meanwhile."""
        with _typed(f"capturing {key}", self._queue), capturing(inputs) as self._tasks:
            try:
                outputs = super().capture_one(key, fn, inputs, after_warmup)
                tasks = self._tasks
            finally:
                self._tasks = None
        self._renewed.pop(key, None)
        if tasks.names:
            npu = _npu()
            self._update_stream = self._update_stream or npu.Stream(self._device.torch_device)
            self._renewed[key] = _Renewed(tasks, npu.Event())
        return outputs

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        """Capture the work of the block; raises `GraphResourcesError` where the NPU's streams are used up.

        A part of a key has no static inputs of its own: an op in it that takes host-side lists of tensors is refused.
        """
        try:
            with _typed(f"capturing {key}", self._queue), super().segment(key), ExitStack() as stack:
                tasks = self._tasks or stack.enter_context(capturing({}))
                stack.enter_context(tasks.record())
                yield
        except GraphResourcesError:
            self._drop_parts(key)
            raise

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Return the names of the inputs whose values the graph of `key` takes from the host."""
        renewed = self._renewed.get(key)
        if renewed is None:
            self._require(key, "host-side arguments")
            return frozenset()
        return renewed.tasks.names

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        """Give the lists of `key` their values for the next replay, all or none.

        step: by input name, its values at the bucket's size. Waits for the graph's replay under way, if there is one.
        Raises `UsageError` for other names, lengths or types than were captured, and what an op's transform of the
        values raises, before anything is changed.
        """
        renewed = self._renewed.get(key)
        if renewed is None:
            self._require(key, "update")
            GraphTasks({}).check(step)
            return
        arguments = renewed.tasks.check(step)
        with self._queue.watched(f"an update of {key}"):
            if renewed.replayed:
                renewed.done.synchronize()
            renewed.ready = False
            renewed.tasks.update(self._update_stream, arguments)
        renewed.ready = True

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        """Launch the graph of `key` on the current stream; refused unless its lists were renewed since its last replay.

        step is not read: `update` has put it into the graph.
        """
        if self._queue.ended:  # the only cost in a replay
            self._queue.require(f"a replay of {key}")
        self._require(key, "replay")
        renewed = self._renewed.get(key)
        if renewed is None:
            return self._launch(key)
        if not renewed.ready:
            raise CaptureError(
                f"a replay of {key}",
                found=f"{', '.join(sorted(renewed.tasks.names))}: not renewed since the last replay; the device would "
                "wait for it for ever",
                remedy="call update() before each replay",
            )
        renewed.ready = False
        outputs = self._launch(key, renewed.done)
        renewed.replayed = True
        return outputs

    def _launch(self, key: GraphKey, done: Any = None) -> tuple[torch.Tensor, ...]:
        try:
            outputs = super().replay(key)
            if done is not None:
                done.record()
        except RuntimeError as error:
            self._queue.check(f"a replay of {key}", error)
            raise
        return outputs

    def cleanup(self) -> None:
        """Drop all graphs with their tasks, and give their pool's memory back."""
        super().cleanup()
        self._renewed.clear()
        self._update_stream = None

    def _require(self, key: GraphKey, what: str) -> None:
        if key in self._graphs or any(known._replace(part=WHOLE) == key for known in self._graphs):
            return
        raise CaptureError(
            f"{what} of {key}",
            found=f"captured are: {', '.join(map(str, self._graphs)) or 'no keys'}",
            remedy="capture it first",
        )

    def _drop_parts(self, key: GraphKey) -> None:
        """Give back the streams of a key's captured parts, since its other parts will not be captured."""
        self._device.synchronize()
        for part in [each for each in self._graphs if each._replace(part=WHOLE) == key._replace(part=WHOLE)]:
            self._graphs.pop(part).graph.reset()
            self._renewed.pop(part, None)


@contextmanager
def _typed(what: str, queue: TaskQueue) -> Iterator[None]:
    """Turn the runtime's errors about used-up streams into `GraphResourcesError`, unless the queue ended with them."""
    try:
        with queue.watched(what):
            yield
    except RuntimeError as error:
        text = str(error)
        if not _EXHAUSTED.search(text):
            raise
        raise GraphResourcesError(
            what,
            found=f"the NPU's streams are used up: {' '.join(text.split())[:200]}",
            remedy="declare fewer buckets, use mode 'full' (one graph per bucket), or a newer driver (HDK 25.5.1)",
        ) from error


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]  # torch_npu registers it
