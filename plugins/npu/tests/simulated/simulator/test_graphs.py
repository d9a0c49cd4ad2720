"""Captured graphs of the simulated runtime: replay, updates of task groups, and what a capture refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simulator import runtime

NO_STREAMS = 207008
NO_RESOURCES = 207005


def capture(function: Callable[[], Tensor], stream: Any = None, mode: str = "thread_local") -> tuple[Any, Tensor]:
    """Capture one call of `function`; returns the graph and what the function returned."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream or torch.npu.Stream(), capture_error_mode=mode):
        out = function()
    return graph, out


def test_a_replay_computes_from_the_present_inputs_into_the_same_memory() -> None:
    x, w = torch.randn(4, 8).npu(), torch.randn(8, 8).npu()
    graph, out = capture(lambda: (x @ w).relu() + 1)
    place = out.data_ptr()
    assert runtime.kernels("run") == [], "a capture computes nothing"
    for seed in range(3):
        new = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        x.copy_(new)
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(out.cpu(), (new @ w.cpu()).relu() + 1)
        assert out.data_ptr() == place


def test_a_graph_over_two_streams_replays_both() -> None:
    x, side = torch.ones(8, device="npu"), torch.npu.Stream()

    def forked() -> Tensor:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            doubled = x * 2
        tripled = x * 3
        torch.npu.current_stream().wait_stream(side)
        return doubled + tripled

    before = runtime.stream_counts()[1]
    graph, out = capture(forked)
    assert runtime.stream_counts()[1] == before + 2
    x.fill_(2)
    graph.replay()
    torch.npu.synchronize()
    assert out.tolist() == [10] * 8
    graph.reset()
    assert runtime.stream_counts()[1] == before


class Updated:
    """x + v in a task group of its own behind an external event, where `v` is an argument on the host."""

    def __init__(self) -> None:
        self.x = torch.ones(8, device="npu")
        self.out = torch.zeros(8, device="npu")
        self.event = torch.npu.ExternalEvent()
        self.updates = torch.npu.Stream()
        self.graph = torch.npu.NPUGraph()
        stream = torch.npu.Stream()
        with torch.npu.graph(self.graph, stream=stream):
            self.event.wait(stream)
            self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            torch.add(self.x, 100.0, out=self.out)
            self.task = torch.npu.graph_task_group_end(stream)

    def update(self, value: float) -> None:
        """Replace the host-side argument, and let one replay pass."""
        with torch.npu.stream(self.updates):
            torch.npu.graph_task_update_begin(self.updates, self.task)
            torch.add(self.x, value, out=self.out)
            torch.npu.graph_task_update_end(self.updates)
            self.event.record(self.updates)


@pytest.mark.parametrize("update_first", [True, False])
def test_updates_replace_arguments_before_and_after_the_replay(update_first: bool) -> None:
    updated = Updated()
    for value in (5.0, 6.0, 7.0):
        steps = [lambda value=value: updated.update(value), updated.graph.replay]
        for step in steps if update_first else reversed(steps):
            step()
        torch.npu.synchronize()
        assert updated.out.tolist() == [1 + value] * 8


def test_a_replay_without_an_update_is_an_error_and_the_runtime_goes_on() -> None:
    updated = Updated()
    updated.graph.replay()
    with pytest.raises(RuntimeError, match=r"waits for ever.*without the update"):
        torch.npu.synchronize()
    assert [event.kind for event in runtime.log()].count("deadlock") == 1
    updated.update(2.0)
    updated.graph.replay()
    torch.npu.synchronize()
    assert updated.out.tolist() == [3] * 8


def test_an_update_has_the_kernels_of_its_group() -> None:
    updated = Updated()
    torch.npu.graph_task_update_begin(updated.updates, updated.task)
    with (
        pytest.raises(RuntimeError, match="has aclnnAdds where the update has aclnnMuls"),
        torch.npu.stream(updated.updates),
    ):
        torch.mul(updated.x, 2.0, out=updated.out)
    with pytest.raises(RuntimeError, match="ends before aclnnAdds"):
        torch.npu.graph_task_update_end(updated.updates)


ILLEGAL: dict[str, tuple[Callable[[Tensor, Any], object], str]] = {
    "item": (lambda x, other: x.sum().item(), "synchronization of a captured stream"),
    "copy to the host": (lambda x, other: x.cpu(), "synchronization of a captured stream"),
    "device synchronization": (lambda x, other: torch.npu.synchronize(), "aclrtSynchronizeDevice"),
    "stream synchronization": (lambda x, other: torch.npu.current_stream().synchronize(), "synchronization"),
    "stream query": (lambda x, other: torch.npu.current_stream().query(), "query of a captured stream"),
    "size from data": (lambda x, other: x.nonzero(), "synchronization of a captured stream"),
    "work outside": (lambda x, other: torch.npu.current_stream().wait_stream(other), "work outside the capture"),
    "fork without join": (lambda x, other: fork(x, other), "did not join"),
}


def fork(x: Tensor, other: Any) -> None:
    """Compute on another stream that never comes back."""
    other.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(other):
        _ = x * 2


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_calls_end_a_capture(name: str) -> None:
    call, reason = ILLEGAL[name]
    x, other = torch.zeros(8, device="npu"), torch.npu.Stream()
    with torch.npu.stream(other):
        _ = x + 1
    with pytest.raises(RuntimeError, match=reason):
        capture(lambda: (x + 1, call(x, other)))  # type: ignore[arg-type, return-value]
    torch.npu.synchronize()
    graph, out = capture(lambda: x + 1)
    graph.replay()
    torch.npu.synchronize()
    assert out.tolist() == [1] * 8


def in_thread(function: Callable[[], object]) -> BaseException | None:
    """Run a function in another thread and return what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize(("mode", "refused"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_a_global_capture_refuses_other_threads_what_may_wait(mode: str, refused: bool) -> None:
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    raised: list[BaseException | None] = []

    def step() -> Tensor:
        raised.append(in_thread(torch.npu.synchronize))
        return x + 1

    graph, out = capture(step, mode=mode)
    assert (raised[0] is not None) == refused
    if refused:
        assert "not permitted while graph" in str(raised[0])
    graph.replay()
    torch.npu.synchronize()
    assert out.tolist() == [1] * 8, "another thread's mistake leaves the capture as it is"


@pytest.mark.parametrize("code", [NO_STREAMS, NO_RESOURCES])
def test_exhaustion_is_injected_once(code: int) -> None:
    x = torch.zeros(8, device="npu")
    runtime.fail_next(runtime.CAPTURE, code, after=1)
    capture(lambda: x + 1)
    with pytest.raises(RuntimeError, match=str(code)):
        capture(lambda: x + 1)
    capture(lambda: x + 1)


def test_a_graph_takes_streams_from_a_limited_number(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(8, device="npu")
    stream = torch.npu.Stream()
    # The runtime reads the environment of the process, which monkeypatch changes through putenv.
    monkeypatch.setenv("ASCEND_SIM_STREAM_LIMIT", str(sum(runtime.stream_counts()) + 2))
    kept = [capture(lambda: x + 1, stream)[0] for _ in range(2)]
    with pytest.raises(RuntimeError, match="stream resources are insufficient"):
        capture(lambda: x + 1, stream)
    kept.pop().reset()
    graph, out = capture(lambda: x + 1, stream)
    graph.replay()
    torch.npu.synchronize()
    assert out.tolist() == [1] * 8


def test_a_failing_kernel_fails_its_replay() -> None:
    weights, places = torch.randn(4, 8).npu(), torch.tensor([1]).npu()
    graph, out = capture(lambda: weights.index_select(0, places))
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(out.cpu(), weights.cpu()[1:2])
    places.fill_(9)
    with pytest.raises(RuntimeError, match="aclnnIndexSelect"):
        graph.replay()
        torch.npu.synchronize()
