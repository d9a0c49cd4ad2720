"""`NPUGraphBackend` on a simulated `torch.npu`: captures, renewal before each replay, refusals, streams used up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_npu import NO_STREAMS, FakeNPU, plant
from host_lists import WINDOWS, expected
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.errors import CaptureError, GraphResourcesError, UsageError
from core_npu.runner import NPUGraphBackend
from core_npu.updates import updatable

KEY, OTHER = GraphKey("decode", (3,)), GraphKey("decode", (2,))
X = torch.arange(12.0).view(3, 4)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNPU:
    return plant(monkeypatch)


def lengths(count: int = 3) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


def windows(lens: Tensor) -> Tensor:
    rows = X[: len(lens)]
    result: Tensor = updatable(WINDOWS, rows, host={"lengths": lens}, out=rows.new_empty(len(lens)))
    return result


def captured(
    fn: Callable[[], Any],
    inputs: Mapping[str, Tensor],
    backend: NPUGraphBackend | None = None,
    key: GraphKey = KEY,
) -> tuple[NPUGraphBackend, Tensor]:
    backend = backend or NPUGraphBackend(torch.device("cpu"))
    with torch.no_grad(), backend.capture_session():
        (out,) = backend.capture_one(key, lambda: (fn(),), inputs, lambda: None)
    return backend, out


def test_a_graph_without_lists_needs_no_update(fake: FakeNPU) -> None:
    x = torch.ones(4)
    backend, out = captured(lambda: x + 1, {"x": x})
    assert backend.host_arguments(KEY) == frozenset()
    for value in (2.0, 5.0):
        x.fill_(value)
        backend.replay(KEY)
        assert out.tolist() == [value + 1] * 4
    backend.update(KEY, {})
    with pytest.raises(UsageError, match="takes from the host: nothing"):
        backend.update(KEY, {"x": [1]})


def test_the_graphs_of_a_program_share_a_pool_and_a_stream(fake: FakeNPU) -> None:
    x, y = torch.ones(4), torch.ones(2)
    backend, _ = captured(lambda: x + 1, {"x": x})
    captured(lambda: y + 1, {"y": y}, backend, OTHER)
    other, _ = captured(lambda: y + 2, {"y": y})
    pools = [line for line in fake.log if line.startswith("capture")]
    assert pools == ["capture in (0, 1)", "capture in (0, 1)", "capture in (0, 2)"]
    streams = [backend._graphs[key].graph.stream for key in (KEY, OTHER)]
    assert streams[0] is streams[1] is not other._graphs[KEY].graph.stream
    assert fake.current is fake.default


def test_several_ops_are_renewed_by_one_update(fake: FakeNPU) -> None:
    lens = lengths()
    backend, out = captured(lambda: windows(lens) + 2 * windows(lens), {"lens": lens})
    assert backend.host_arguments(KEY) == {"lens"}
    for values in ([1, 2, 3], [4, 0, 1], [4, 0, 1]):
        backend.update(KEY, {"lens": values})
        backend.replay(KEY)
        assert out.tolist() == [3 * each for each in expected(X, values)]
    assert fake.log.count("signal") == 6


def test_an_update_waits_for_the_replay_under_way_of_its_graph(fake: FakeNPU) -> None:
    lens = lengths()
    backend, _ = captured(lambda: windows(lens), {"lens": lens})
    captured(lambda: windows(lens[:2]), {"lens": lens[:2]}, backend, OTHER)
    fake.log.clear()
    for key, values in ((KEY, [1, 1, 1]), (OTHER, [1, 1]), (KEY, [2, 2, 2])):
        backend.update(key, {"lens": values})
        backend.replay(key)
    one = ["update", "signal", "replay", "mark"]
    assert fake.log == [*one, *one, "wait for mark", *one]


def test_a_replay_without_an_update_is_refused_before_the_device_could_hang(fake: FakeNPU) -> None:
    lens = lengths()
    backend, out = captured(lambda: windows(lens), {"lens": lens})
    for _ in range(2):
        with pytest.raises(CaptureError, match="lens: not renewed since the last replay"):
            backend.replay(KEY)
        backend.update(KEY, {"lens": [2, 2, 2]})
        backend.replay(KEY)
        assert out.tolist() == expected(X, [2, 2, 2])
    assert fake.log.count("replay") == 2


@pytest.mark.parametrize("step", [{}, {"length": [1, 1, 1]}, {"lens": [1, 1]}, {"lens": [1, 1, "1"]}])
def test_an_update_that_does_not_fit_changes_nothing(fake: FakeNPU, step: dict[str, Any]) -> None:
    lens = lengths()
    backend, out = captured(lambda: windows(lens), {"lens": lens})
    backend.update(KEY, {"lens": [1, 2, 3]})
    with pytest.raises(UsageError):
        backend.update(KEY, step)
    backend.replay(KEY)
    assert out.tolist() == expected(X, [1, 2, 3])


def test_an_update_that_fails_in_the_middle_leaves_no_graph_to_replay(fake: FakeNPU) -> None:
    lens, faults = lengths(), list[int]()

    def op(*args: Any, **kwargs: Any) -> Any:
        if faults:
            raise RuntimeError("planted")
        return WINDOWS(*args, **kwargs)

    def fn() -> Tensor:
        second: Tensor = updatable(op, X, host={"lengths": lens}, out=X.new_empty(3))
        return windows(lens) + second

    backend, out = captured(fn, {"lens": lens})
    backend.update(KEY, {"lens": [1, 1, 1]})
    backend.replay(KEY)
    faults.append(1)
    with pytest.raises(RuntimeError, match="planted"):
        backend.update(KEY, {"lens": [2, 2, 2]})
    with pytest.raises(CaptureError, match="not renewed"):
        backend.replay(KEY)
    faults.clear()
    backend.update(KEY, {"lens": [3, 3, 3]})
    backend.replay(KEY)
    assert out.tolist() == [2 * each for each in expected(X, [3, 3, 3])]


def test_unknown_keys_are_refused(fake: FakeNPU) -> None:
    backend, _ = captured(lambda: X + 1, {})
    for call in (backend.host_arguments, backend.replay, lambda key: backend.update(key, {"lens": [1]})):
        with pytest.raises(CaptureError, match=r"of decode\[2\]\n  found: captured are: decode\[3\]"):
            call(OTHER)


def test_a_key_that_is_captured_again_forgets_its_lists(fake: FakeNPU) -> None:
    lens = lengths()
    backend, _ = captured(lambda: windows(lens), {"lens": lens})
    _, out = captured(lambda: X + 1, {}, backend)
    assert backend.host_arguments(KEY) == frozenset()
    assert torch.equal(backend.replay(KEY)[0], out)


def test_cleanup_gives_the_streams_back(fake: FakeNPU) -> None:
    lens = lengths()
    backend, _ = captured(lambda: windows(lens), {"lens": lens})
    assert fake.num_streams == 99
    backend.cleanup()
    assert fake.num_streams == 100
    with pytest.raises(CaptureError, match="no keys"):
        backend.replay(KEY)


def test_launches_prepared_by_another_thread_are_refused(fake: FakeNPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(CaptureError, match="TASK_QUEUE_ENABLE=2") as caught:
        captured(lambda: X + 1, {})
    assert "TASK_QUEUE_ENABLE=1" in caught.value.remedy and not fake.log
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    captured(lambda: X + 1, {})


def test_a_host_read_in_a_capture_leaves_the_backend_usable(fake: FakeNPU) -> None:
    with pytest.raises(RuntimeError, match="107027"):
        captured(lambda: X * X.sum().item(), {})
    _, out = captured(lambda: X + 1, {})
    assert torch.equal(out, X + 1)


@pytest.mark.parametrize(
    "text",
    [
        NO_STREAMS,
        "NPU function error: aclrtCreateStreamWithConfig, error code is 207005",
        "EL0005: Alloc sq cq fail",
        "[Error]: The stream resources are insufficient.",
    ],
)
def test_used_up_streams_are_a_type_of_their_own(fake: FakeNPU, text: str) -> None:
    def fn() -> Tensor:
        raise RuntimeError(text)

    with pytest.raises(GraphResourcesError, match="streams are used up") as caught:
        captured(fn, {})
    assert caught.value.asked == f"capturing {KEY}" and isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("text", ["error code is 207001", "error code is 1207008", "out of memory"])
def test_other_errors_are_not(fake: FakeNPU, text: str) -> None:
    def fn() -> Tensor:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text):
        captured(fn, {})


def test_keys_captured_before_the_streams_ran_out_stay_valid(fake: FakeNPU) -> None:
    lens = lengths()
    backend, out = captured(lambda: windows(lens), {"lens": lens})
    fake.num_streams = 0
    with pytest.raises(GraphResourcesError):
        captured(lambda: windows(lens[:2]), {"lens": lens[:2]}, backend, OTHER)
    assert not backend.can_run(OTHER) and fake.current is fake.default and not fake.recording
    assert fake.log.count("release (0, 1)") == 1  # the pool's count of users, which the failed capture had raised
    backend.update(KEY, {"lens": [3, 2, 1]})
    backend.replay(KEY)
    assert out.tolist() == expected(X, [3, 2, 1])


def test_segments_are_replayed_one_by_one_and_have_no_lists(fake: FakeNPU) -> None:
    backend, x, lens = NPUGraphBackend(torch.device("cpu")), torch.ones(4), lengths()
    parts = [KEY._replace(part=number) for number in range(2)]
    with torch.no_grad(), backend.capture_session():
        with backend.segment(parts[0]):
            y = x + 1
        with backend.segment(parts[1]):
            z = y * 2
        with pytest.raises(CaptureError, match="the graph is a part of a key"), backend.segment(OTHER):
            windows(lens)
    assert backend.host_arguments(KEY) == frozenset() and not backend.can_run(OTHER)
    x.fill_(3)
    assert [backend.replay(part) for part in parts] == [(), ()]
    assert z.tolist() == [8.0] * 4


def test_a_segment_without_streams_drops_the_parts_before_it(fake: FakeNPU) -> None:
    backend, x = NPUGraphBackend(torch.device("cpu")), torch.ones(4)
    fake.num_streams = 2
    with torch.no_grad(), backend.capture_session():
        with backend.segment(OTHER._replace(part=0)):
            y = x + 1
        with backend.segment(KEY._replace(part=0)):
            x * 2
        with (
            pytest.raises(GraphResourcesError, match=r"capturing decode\[3\] part 1"),
            backend.segment(KEY._replace(part=1)),
        ):
            x * 3
    assert fake.num_streams == 1
    assert not backend.can_run(KEY._replace(part=0))
    x.fill_(5)
    backend.replay(OTHER._replace(part=0))
    assert y.tolist() == [6.0] * 4
