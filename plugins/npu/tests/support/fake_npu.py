"""A small `torch.npu` on the host, for the plugin's own logic without torch_npu: graphs, task groups, streams, events.

Tensors are on the CPU. A capture runs each op and records it; a replay runs them again into the same results. What a
device would do silently wrong or never finish is an error here: `FakeNPU.log` names everything in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from core_npu.task_queue import task_queue

NO_STREAMS = (
    "operator():NPUGraph.cpp:1 NPU function error: aclmdlRICaptureBegin, error code is 207008 (no stream resource)"
)


@dataclass(eq=False)
class Node:
    """One recorded call, with where its results lie."""

    op: Any
    args: Any
    kwargs: Any
    result: Any

    def run(self) -> None:
        again = self.op(*self.args, **self.kwargs)
        for old, new in zip(pytree.tree_leaves(self.result), pytree.tree_leaves(again), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Recorder(TorchDispatchMode):
    """Records the calls of a capture into the list of its graph."""

    def __init__(self, fake: FakeNPU) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default,):
            raise RuntimeError("fake: a host read in a capture, error code is 107027")
        result = func(*args, **(kwargs or {}))
        self.fake.add(Node(func, args, kwargs or {}, result))
        return result


class Updater(TorchDispatchMode):
    """Takes the arguments of the call that is issued, into the task group that is updated; nothing runs."""

    def __init__(self, group: list[Node]) -> None:
        super().__init__()
        self.group = group
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = self.group[self.seen]
        assert node.op is func, (node.op, func)
        node.args, node.kwargs, self.seen = args, kwargs or {}, self.seen + 1
        return node.result


@dataclass(eq=False)
class Stream:
    """A stream; the fake runs everything in order, so it is a name."""

    name: str

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: what the other stream was given is done."""


@dataclass
class FakeNPU:
    """What `torch.npu` has, as far as the plugin uses it. num_streams: how many graphs can be captured."""

    num_streams: int = 100
    log: list[str] = field(default_factory=list)
    graph: Any = None
    group: list[Node] | None = None
    modes: list[TorchDispatchMode] = field(default_factory=list)
    recording: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.default = self.current = Stream("default")
        self.NPUGraph: Callable[[], Any] = lambda: Graph(self)
        self.ExternalEvent: Callable[[], Any] = lambda: ExternalEvent(self)
        self.Event: Callable[[], Any] = lambda: Event(self)
        self.num_pools = self.num_named = 0

    def Stream(self, device: Any = None) -> Stream:
        self.num_named += 1
        return Stream(f"stream {self.num_named}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def default_stream(self, device: Any = None) -> Stream:
        return self.default

    def current_stream(self) -> Stream:
        return self.current

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def synchronize(self, device: Any = None) -> None:
        if self.graph is not None:
            raise RuntimeError("fake: a wait in a capture, error code is 107027")
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def endAllocateToPool(self, index: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("fake: endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def releasePool(self, index: int, pool: Any) -> None:
        self.log.append(f"release {pool}")

    def add(self, node: Any) -> None:
        self.graph.nodes.append(node)
        if self.group is not None:
            self.group.append(node)

    def graph_task_group_begin(self, stream: Stream) -> None:
        assert stream is self.graph.stream and self.group is None
        self.group = []

    def graph_task_group_end(self, stream: Stream) -> list[Node]:
        assert self.group is not None
        group, self.group = self.group, None
        return group

    def graph_task_update_begin(self, stream: Stream, handle: list[Node]) -> None:
        assert stream is self.current is not self.default
        self.log.append("update")
        self.modes.append(Updater(handle))
        self.modes[-1].__enter__()

    def graph_task_update_end(self, stream: Stream) -> None:
        self.modes.pop().__exit__(None, None, None)


class Graph:
    """An `NPUGraph`."""

    def __init__(self, fake: FakeNPU) -> None:
        self.fake, self.nodes, self.state = fake, list[Any](), "new"

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        fake = self.fake
        assert self.state == "new" and fake.current is not fake.default and fake.graph is None
        assert capture_error_mode == "thread_local"
        fake.log.append(f"capture in {pool}")
        fake.recording.add(pool)
        if fake.num_streams == 0:
            raise RuntimeError(NO_STREAMS)
        fake.num_streams -= 1
        fake.graph, self.stream, self.pool, self.state = self, fake.current, pool, "capturing"
        self.recorder = Recorder(fake)
        self.recorder.__enter__()

    def capture_end(self) -> None:
        if self.state != "capturing":
            raise RuntimeError("fake: no capture is under way")
        self.recorder.__exit__(None, None, None)
        self.fake.graph, self.state = None, "ready"
        self.fake.recording.remove(self.pool)

    def replay(self) -> None:
        assert self.state == "ready"
        self.fake.log.append("replay")
        with torch.no_grad():
            for node in self.nodes:
                node.run()

    def reset(self) -> None:
        self.fake.num_streams += self.state == "ready"
        self.nodes, self.state = [], "reset"


class ExternalEvent:
    """A flag in device memory: a replay waits for it, and the reset behind the wait takes it down again."""

    def __init__(self, fake: FakeNPU) -> None:
        self.fake, self.flag = fake, False

    def wait(self, stream: Stream) -> None:
        self.fake.add(_Action(self._wait))

    def reset(self, stream: Stream) -> None:
        self.fake.add(_Action(self._reset))

    def record(self, stream: Stream) -> None:
        assert stream is self.fake.current
        self.fake.log.append("signal")
        self.flag = True

    def _wait(self) -> None:
        if not self.flag:
            raise AssertionError("fake: DEADLOCK, the graph waits for an update")

    def _reset(self) -> None:
        self.flag = False


@dataclass(eq=False)
class _Action:
    run: Callable[[], None]


class Event:
    """An ordinary event."""

    def __init__(self, fake: FakeNPU) -> None:
        self.fake = fake

    def record(self) -> None:
        self.fake.log.append("mark")

    def synchronize(self) -> None:
        self.fake.log.append("wait for mark")


def plant(monkeypatch: pytest.MonkeyPatch) -> FakeNPU:
    """Put a new fake where torch_npu would be, and return it."""
    fake = FakeNPU()
    names = {"_npu_endAllocateToPool": fake.endAllocateToPool, "_npu_releasePool": fake.releasePool}
    package = ModuleType("torch_npu")
    package._C = SimpleNamespace(**names)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    task_queue.cache_clear()
    return fake
