"""core/common/graphs/streams.py: sessions, pools and failures, on a device that is a list of what was asked of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from core.common.graphs.backend import GraphKey
from core.common.graphs.streams import FIRST_GRAPH_WARMUPS, LATER_GRAPH_WARMUPS, StreamGraphBackend
from core.errors import CaptureError
from tests.support import refused

KEY, OTHER = GraphKey("main", (4,)), GraphKey("main", (8,))


class FakeGraph:
    """A graph that notes what happens to it."""

    def __init__(self, log: list[str], number: int, pool: str) -> None:
        self.log, self.number, self.pool = log, number, pool

    def replay(self) -> None:
        self.log.append(f"replay {self.number}")

    def reset(self) -> None:
        self.log.append(f"reset {self.number}")


class FakeGraphs:
    """`StreamGraphs` that capture nothing. failing: the call that raises, once."""

    torch_device = torch.device("cpu")

    def __init__(self, failing: str = "") -> None:
        self.log: list[str] = []
        self.failing = failing
        self.num_pools = self.num_graphs = 0

    def _note(self, what: str) -> None:
        self.log.append(what)
        if self.failing and what.startswith(self.failing):
            self.failing = ""
            raise RuntimeError(f"{what} failed")

    def new_pool(self) -> str:
        self.num_pools += 1
        return f"pool {self.num_pools}"

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        self._note("enter stream")
        try:
            yield
        finally:
            self._note("leave stream")

    def begin(self, pool: str) -> FakeGraph:
        self.num_graphs += 1
        self._note(f"begin {self.num_graphs} in {pool}")
        return FakeGraph(self.log, self.num_graphs, pool)

    def end(self, graph: FakeGraph) -> None:
        self._note(f"end {graph.number}")

    def abandon(self, graph: FakeGraph, pool: str) -> None:
        self._note(f"abandon {graph.number} in {pool}")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def release(self) -> None:
        self.log.append("release")


def fails() -> tuple[Tensor, ...]:
    raise RuntimeError("no kernel")


def test_a_capture_warms_up_on_its_stream_and_shares_one_pool() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)

    def fn() -> tuple[Tensor, ...]:
        device.log.append("run")
        return (torch.ones(1),)

    with backend.capture_session():
        for key in (KEY, OTHER):
            backend.capture_one(key, fn, {}, lambda: device.log.append("warm"))
    assert device.log == [
        "enter stream",
        *["run"] * FIRST_GRAPH_WARMUPS,
        *("warm", "synchronize", "begin 1 in pool 1", "run", "end 1"),
        *["run"] * LATER_GRAPH_WARMUPS,
        *("warm", "synchronize", "begin 2 in pool 1", "run", "end 2"),
        "leave stream",
    ]
    assert FIRST_GRAPH_WARMUPS > LATER_GRAPH_WARMUPS >= 1
    with backend.capture_session():
        backend.capture_one(KEY, fn, {}, lambda: None)
    assert "begin 3 in pool 1" in device.log and device.num_pools == 1


def test_each_key_launches_its_own_graph() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)
    part = KEY._replace(part=0)
    with backend.capture_session():
        backend.capture_one(KEY, lambda: (torch.ones(1),), {}, lambda: None)
        backend.capture_one(OTHER, lambda: (torch.zeros(2), torch.zeros(3)), {}, lambda: None)
        with backend.segment(part):
            pass
    del device.log[:]
    with backend.replay_session():
        shapes = [[tuple(t.shape) for t in backend.replay(key)] for key in (OTHER, KEY, part, OTHER)]
    assert shapes == [[(2,), (3,)], [(1,)], [], [(2,), (3,)]]
    assert device.log == ["replay 2", "replay 1", "replay 3", "replay 2"]
    assert [backend.can_run(key) for key in (KEY, OTHER, part, KEY._replace(phase="verify"))] == [True] * 3 + [False]


def test_outputs_are_held_weakly_and_inputs_stay() -> None:
    backend = StreamGraphBackend(FakeGraphs())
    references: list[StorageWeakRef] = []
    given = {"x": torch.ones(4)}

    def fn() -> tuple[Tensor, ...]:
        result = given["x"] * 2
        references.append(StorageWeakRef(result.untyped_storage()))
        return result, given["x"], given["x"][2:]

    with torch.no_grad(), backend.capture_session():
        first = backend.capture_one(KEY, fn, given, lambda: None)
    gc.collect()
    assert all(reference.expired() for reference in references), "the pool could not reuse the memory of an output"
    address = given["x"].data_ptr()
    assert [t.data_ptr() for t in first[1:]] == [address, address + 8]
    assert [t.data_ptr() for t in backend.replay(KEY)] == [first[0].data_ptr(), address, address + 8]
    reference = StorageWeakRef(given["x"].untyped_storage())
    given.clear()
    assert not reference.expired(), "a graph that hands its input out needs its memory"


def test_outside_of_a_session_nothing_is_captured() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)
    for _ in range(2):
        with refused(CaptureError, "capture of main[4]", "no capture session", "capture_session()"):
            backend.capture_one(KEY, fails, {}, lambda: None)
        with refused(CaptureError, "no capture session"), backend.segment(KEY):
            pytest.fail("entered")
        with backend.capture_session():
            pass
    assert device.log == ["enter stream", "leave stream"] * 2


@pytest.mark.parametrize("where", ["block", "end", "abandon"])
def test_a_broken_capture_is_abandoned_and_its_pool_left(where: str) -> None:
    device = FakeGraphs({"end": "end 2", "abandon": "abandon 2"}.get(where, ""))
    backend = StreamGraphBackend(device)
    with backend.capture_session(), backend.segment(OTHER):
        pass
    with pytest.raises(RuntimeError, match=r"failed|no kernel"), backend.capture_session(), backend.segment(KEY):
        if where != "end":
            fails()
    assert "abandon 2 in pool 1" in device.log and device.log[-1] == "leave stream"
    assert not backend.can_run(KEY) and backend.can_run(OTHER)
    with backend.capture_session(), backend.segment(KEY):
        pass
    assert "begin 3 in pool 2" in device.log
    backend.replay(OTHER), backend.replay(KEY)
    assert device.log[-2:] == ["replay 1", "replay 3"]


def test_a_capture_that_does_not_begin_leaves_its_pool() -> None:
    device = FakeGraphs("begin 2 in pool 1")
    backend = StreamGraphBackend(device)
    with backend.capture_session(), backend.segment(OTHER):
        pass
    with pytest.raises(RuntimeError), backend.capture_session(), backend.segment(KEY):
        pytest.fail("entered")
    with backend.capture_session(), backend.segment(KEY):
        pass
    assert "begin 3 in pool 2" in device.log and backend.can_run(OTHER)


def test_a_failing_warm_up_begins_no_capture() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)
    with pytest.raises(RuntimeError, match="no kernel"), backend.capture_session():
        backend.capture_one(KEY, fails, {}, lambda: None)
    assert device.log == ["enter stream", "leave stream"] and not backend.can_run(KEY)


def test_a_failing_capture_keeps_the_graph_of_before() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)
    with backend.capture_session(), backend.segment(KEY):
        pass
    with pytest.raises(RuntimeError, match="no kernel"), backend.capture_session(), backend.segment(KEY):
        fails()
    backend.replay(KEY)
    assert device.log[-1] == "replay 1"


def test_cleanup_waits_then_resets_every_graph_and_gives_memory_back() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)
    with backend.capture_session():
        backend.capture_one(KEY, lambda: (torch.ones(1),), {}, lambda: None)
        backend.capture_one(OTHER, lambda: (torch.ones(1),), {}, lambda: None)
    del device.log[:]
    backend.cleanup()
    assert device.log == ["synchronize", "reset 1", "reset 2", "release"]
    assert not backend.can_run(KEY)
    backend.cleanup()
    with backend.capture_session():
        backend.capture_one(KEY, lambda: (torch.ones(1),), {}, lambda: None)
    assert "begin 3 in pool 2" in device.log


def test_what_a_failed_program_captured_goes_with_cleanup() -> None:
    device = FakeGraphs()
    backend = StreamGraphBackend(device)
    with pytest.raises(RuntimeError, match="no kernel"), backend.capture_session():
        with backend.segment(OTHER):
            pass
        with backend.segment(KEY):
            fails()
    backend.cleanup()
    assert device.log[-2:] == ["reset 1", "release"]


def test_a_backend_is_used_by_a_runner_in_parts() -> None:
    from core.compilation.capture.breaks import eager_break
    from core.compilation.capture.segments import capture_parts

    @eager_break
    def step(x: Tensor) -> Tensor:
        return x + 1

    device = FakeGraphs()
    backend: Any = StreamGraphBackend(device)
    with backend.capture_session():
        parts = capture_parts(
            backend,
            KEY,
            lambda: (step(torch.ones(2) * 2),),
            num_warmups=1,
            after_warmup=lambda: None,
            device=torch.device("cpu"),
        )
    assert parts.num_graphs == 2 and "begin 2 in pool 1" in device.log
    # Each part ran right after it was captured: what comes next reads what it computes.
    order = [line for line in device.log if line.startswith(("end", "replay"))]
    assert order == ["end 1", "replay 1", "end 2", "replay 2"]


class _Meeting(FakeGraphs):
    """A device that notes how many threads capture on it, or wait for all of its work, at once."""

    def __init__(self, inside: list[int], together: list[int]) -> None:
        super().__init__()
        self._inside, self._together = inside, together

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        self._inside.append(1)
        self._together.append(len(self._inside))
        try:
            yield
        finally:
            self._inside.pop()

    def synchronize(self) -> None:
        self._together.append(len(self._inside))


def test_threads_capture_and_clean_up_in_turns() -> None:
    inside, together = list[int](), list[int]()
    backends = [StreamGraphBackend(_Meeting(inside, together)) for _ in range(2)]
    first_is_in, second_waits = threading.Event(), threading.Event()

    def second() -> None:
        first_is_in.wait(5)
        second_waits.set()
        with backends[1].capture_session():
            pass

    def third() -> None:
        first_is_in.wait(5)
        backends[1].cleanup()

    threads = [threading.Thread(target=second), threading.Thread(target=third)]
    for thread in threads:
        thread.start()
    with backends[0].capture_session():
        first_is_in.set()
        assert second_waits.wait(5)
        for thread in threads:
            thread.join(0.2)
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(5)
    # Two sessions alone each, and one wait with nobody capturing.
    assert sorted(together) == [0, 1, 1]
