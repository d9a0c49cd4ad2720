"""A task queue that has ended, on a simulated `torch.npu`: what tells so, and that nothing is captured or replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_npu import NO_STREAMS, FakeNPU, plant
from host_lists import WINDOWS
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.errors import CaptureError, DeviceUnavailableError, GraphResourcesError
from core_npu.runner import NPUGraphBackend
from core_npu.task_queue import task_queue
from core_npu.updates import updatable

KEY, OTHER = GraphKey("decode", (3,)), GraphKey("decode", (2,))
X, LENS = torch.arange(12.0).view(3, 4), torch.zeros(3, dtype=torch.int32)
CPU = torch.device("cpu")
TOLD = "The Inner error is reported as above. The process exits for this inner error, and the operator is aclnnSin."


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNPU:
    return plant(monkeypatch)


def captured(backend: NPUGraphBackend, key: GraphKey, fn: Callable[[], Any]) -> None:
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(key, lambda: (fn(),), {"lens": LENS}, lambda: None)


def windows() -> Tensor:
    result: Tensor = updatable(WINDOWS, X, host={"lengths": LENS}, out=X.new_empty(3))
    return result


def failing(text: str) -> Callable[[], Tensor]:
    def fn() -> Tensor:
        raise RuntimeError(text)

    return fn


def drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fills do nothing, as every op behind an ended queue."""
    monkeypatch.setattr(Tensor, "fill_", lambda self, value: self)


def test_an_error_that_tells_of_it_ends_all_work_of_the_backend(fake: FakeNPU) -> None:
    backend = NPUGraphBackend(CPU)
    captured(backend, KEY, windows)
    backend.update(KEY, {"lens": [1, 1, 1]})
    captured(backend, OTHER, lambda: X + 1)
    with pytest.raises(DeviceUnavailableError, match="ops return and do nothing; it said: The Inner error") as caught:
        captured(backend, GraphKey("decode", (1,)), failing(TOLD))
    assert "TASK_QUEUE_ENABLE=0" in caught.value.remedy and isinstance(caught.value.__cause__, RuntimeError)
    fake.log.clear()
    again = NPUGraphBackend(CPU)
    for call in (
        lambda: backend.replay(KEY),
        lambda: backend.replay(OTHER),
        lambda: backend.update(KEY, {"lens": [1, 1, 1]}),
        lambda: captured(backend, OTHER, lambda: X + 1),
        lambda: captured(again, OTHER, lambda: X + 1),  # the queue is the process's
    ):
        with pytest.raises(DeviceUnavailableError, match="task queue has ended"):
            call()
    assert not fake.log


@pytest.mark.parametrize("text", ["error code is 207001", NO_STREAMS])
def test_after_any_error_of_a_capture_a_value_is_written_and_read(
    fake: FakeNPU, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    backend = NPUGraphBackend(CPU)
    captured(backend, KEY, lambda: X + 1)
    with pytest.raises((RuntimeError, GraphResourcesError)):
        captured(backend, OTHER, failing(text))
    backend.replay(KEY)
    captured(backend, OTHER, lambda: X + 2)
    drop(monkeypatch)
    with pytest.raises(DeviceUnavailableError, match="task queue has ended"):
        captured(backend, OTHER, failing(text))
    with pytest.raises(DeviceUnavailableError):
        backend.replay(KEY)


def test_a_failure_of_somebody_else_is_found_before_the_next_capture(
    fake: FakeNPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = NPUGraphBackend(CPU)
    captured(backend, KEY, lambda: X + 1)
    drop(monkeypatch)
    fake.log.clear()
    with pytest.raises(DeviceUnavailableError, match="a capture session"):
        captured(backend, OTHER, lambda: X + 1)
    assert not fake.log


@pytest.mark.parametrize("what", ["update", "replay"])
def test_a_failed_update_or_replay_is_looked_after_too(fake: FakeNPU, what: str) -> None:
    backend = NPUGraphBackend(CPU)
    captured(backend, KEY, windows)
    backend.update(KEY, {"lens": [1, 1, 1]})
    if what == "update":
        fake.graph_task_update_begin = failing_call  # type: ignore[assignment]
    else:
        backend._graphs[KEY].graph.replay = failing_call  # type: ignore[method-assign]
    with pytest.raises(DeviceUnavailableError, match=rf"{what} of decode\[3\]"):
        backend.update(KEY, {"lens": [2, 2, 2]}) if what == "update" else backend.replay(KEY)


def failing_call(*_: Any) -> Any:
    raise RuntimeError("Task queue thread is exit, can't call 'Enqueue'")


def test_a_value_that_cannot_be_read_proves_nothing(fake: FakeNPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Tensor) -> Any:
        raise RuntimeError("error code is 107027")

    monkeypatch.setattr(Tensor, "item", refused)
    queue = task_queue(CPU)
    queue.check("a test", RuntimeError("error code is 207001"))
    assert not queue.ended


def test_without_a_queue_nothing_is_asked(fake: FakeNPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    drop(monkeypatch)
    captured(NPUGraphBackend(CPU), KEY, lambda: X + 1)


def test_the_value_may_be_written_in_and_out_of_inference_mode(fake: FakeNPU) -> None:
    queue = task_queue(CPU)
    with torch.inference_mode():
        queue.check("a test")
    queue.check("a test")
    assert not queue.ended


def test_a_replay_refuses_before_it_asks_whether_lists_were_renewed(fake: FakeNPU) -> None:
    backend = NPUGraphBackend(CPU)
    captured(backend, KEY, windows)
    with pytest.raises(CaptureError, match="not renewed"):
        backend.replay(KEY)
    task_queue(CPU).ended = True
    with pytest.raises(DeviceUnavailableError):
        backend.replay(KEY)
