"""Host-side lists: read outside of a capture, found among the inputs inside, renewed as tasks of their graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fake_npu import FakeNPU, plant
from host_lists import WINDOWS, expected
from torch import Tensor

from core.errors import CaptureError, UsageError
from core_npu.update_tasks import GraphTasks, capturing
from core_npu.updates import FromInputs, host_values, is_capturing, updatable

X = torch.arange(12.0).view(3, 4)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNPU:
    return plant(monkeypatch)


@pytest.fixture
def lens() -> Tensor:
    return torch.tensor([1, 2, 3], dtype=torch.int32)


def windows(lengths: Any, **more: Any) -> Tensor:
    result: Tensor = updatable(WINDOWS, X, host={"lengths": lengths, **more}, out=X.new_empty(3))
    return result


def recorded(fake: FakeNPU, inputs: Mapping[str, Tensor], fn: Any) -> tuple[Any, GraphTasks, Any]:
    """Warm up and capture a function by hand, as the backend does; return the graph, its tasks and the result."""
    graph = fake.NPUGraph()
    with capturing(inputs) as tasks, fake.stream(fake.Stream()):
        fn()
        graph.capture_begin(pool=None, capture_error_mode="thread_local")
        try:
            with tasks.record():
                out = fn()
        finally:
            graph.capture_end()
    return graph, tasks, out


def test_outside_of_a_capture_the_tensors_are_read(lens: Tensor) -> None:
    assert host_values(lens) == [1, 2, 3] and host_values(lens.view(3, 1).long()) == [1, 2, 3]
    assert windows(lens).tolist() == expected(X, [1, 2, 3])
    made = FromInputs(lens, lens, transform=lambda a, b: [4 - max(m, n) for m, n in zip(a, b, strict=True)])
    assert windows(made).tolist() == expected(X, [3, 2, 1])
    assert not is_capturing()


def test_a_workspace_is_passed_on_where_there_is_one(lens: Tensor) -> None:
    seen = []

    def op(x: Tensor, **kwargs: Any) -> None:
        seen.append(sorted(kwargs))

    updatable(op, X, host={"lengths": lens}, out=X, workspace=X)
    updatable(op, X, host={"lengths": lens}, out=X, scale=2)
    assert seen == [["lengths", "out", "workspace"], ["lengths", "out", "scale"]]


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int16)])
def test_values_of_other_dtypes_are_refused(tensor: Tensor) -> None:
    with pytest.raises(UsageError, match="give an int32 or int64 tensor"):
        host_values(tensor)
    with capturing({"x": tensor}), pytest.raises(UsageError, match="no ints"):
        windows(tensor)


def test_a_host_argument_of_several_tensors_needs_a_transform(lens: Tensor) -> None:
    for tensors in ((), (lens, lens)):
        with pytest.raises(UsageError, match=f"FromInputs of {len(tensors)} tensors"):
            FromInputs(*tensors)


def test_each_update_reaches_every_op_of_the_graph(fake: FakeNPU, lens: Tensor) -> None:
    starts = torch.tensor([0, 1, 0, 9], dtype=torch.int64)
    inputs = {"lens": lens, "starts": starts}

    def fn() -> tuple[Tensor, Tensor]:
        first = windows(lens, starts=FromInputs(starts, transform=lambda s: s[:3]))
        second = windows(FromInputs(lens, transform=lambda n: [4 - each for each in n]), starts=starts[1:])
        return first, second + first

    graph, tasks, (first, second) = recorded(fake, inputs, fn)
    assert (tasks.names, len(tasks.tasks)) == ({"lens", "starts"}, 2)
    for lengths, begins in (([2, 2, 1], [1, 0, 2, 0]), ([0, 1, 4], [0, 0, 0, 1])):
        tasks.update(fake.Stream(), tasks.check({"lens": lengths, "starts": begins}))
        graph.replay()
        wanted = expected(X, lengths, begins[:3])
        assert first.tolist() == wanted
        others = expected(X, [4 - n for n in lengths], begins[1:])
        assert second.tolist() == [a + b for a, b in zip(wanted, others, strict=True)]


def test_a_replay_consumes_its_update(fake: FakeNPU, lens: Tensor) -> None:
    graph, tasks, _ = recorded(fake, {"lens": lens}, lambda: windows(lens))
    tasks.update(fake.Stream(), tasks.check({"lens": [1, 1, 1]}))
    graph.replay()
    with pytest.raises(AssertionError, match="DEADLOCK"):
        graph.replay()


def test_the_tasks_hold_no_tensor_of_the_inputs(fake: FakeNPU) -> None:
    inputs = {"lens": torch.tensor([1, 2, 3], dtype=torch.int32)}
    _, tasks, _ = recorded(fake, inputs, lambda: windows(FromInputs(inputs["lens"], transform=list)))
    for task in tasks.tasks:
        assert not [leaf for leaf in task.host.values() if isinstance(leaf, Tensor)]
        assert not any("tensors" in str(argument) for argument in task.host.values())


LENS = torch.tensor([1, 2, 3, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("known", "tensor"),
    [
        pytest.param(LENS, LENS.long(), id="cast"),
        pytest.param(LENS, LENS + 1, id="computed"),
        pytest.param(LENS, LENS[::2], id="strided"),
        pytest.param(LENS, LENS.clone(), id="another"),
        pytest.param(LENS[:2], LENS, id="longer"),
    ],
)
def test_a_tensor_that_is_no_input_is_refused_before_the_capture(known: Tensor, tensor: Tensor) -> None:
    with capturing({"lens": known}) as tasks:
        for call in (lambda: host_values(tensor), lambda: windows(tensor)):
            with pytest.raises(CaptureError, match=r"none of the program's inputs \(lens\)"):
                call()
        assert not tasks.tasks and not is_capturing()


def test_a_part_of_an_input_is_found_by_its_address(lens: Tensor) -> None:
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    with capturing({"lens": lens, "table": table}):
        assert host_values(table[1]) == [3, 4, 5] and host_values(lens[1:]) == [2, 3]
        assert host_values(table) == [0, 1, 2, 3, 4, 5] and host_values(lens[:0]) == []


def test_a_capture_gives_the_values_of_its_warm_up(fake: FakeNPU, lens: Tensor) -> None:
    sizes = []

    def fn() -> Tensor:
        sizes.append(max(host_values(lens)))  # a workspace's size
        return windows(lens)

    _, tasks, _ = recorded(fake, {"lens": lens}, fn)
    assert sizes == [3, 3] and tasks.names == {"lens"}


def test_values_that_no_task_renews_are_refused(fake: FakeNPU, lens: Tensor) -> None:
    other = lens.clone()

    def fn() -> Tensor:
        return windows(lens) + X[:, : max(host_values(other))].sum()

    with pytest.raises(CaptureError, match="capturing values of 'other'") as caught:
        recorded(fake, {"lens": lens, "other": other}, fn)
    assert "no update task renews them" in caught.value.found


def test_a_capture_that_goes_another_way_than_its_warm_up_is_refused(fake: FakeNPU, lens: Tensor) -> None:
    calls: list[int] = []

    def fn() -> None:
        calls.append(1)
        if len(calls) > 1:
            windows(lens)

    with pytest.raises(CaptureError, match="'lens' inside a capture\n  found: no warm-up read them"):
        recorded(fake, {"lens": lens}, fn)


@pytest.mark.parametrize(
    ("step", "phrase"),
    [
        ({}, r"with \[\]\n  found: the graph takes from the host: lens"),
        ({"lens": [1, 1, 1], "more": [1]}, "'more'"),
        ({"lens": [1, 1]}, "2 entries\n  to do: give 3 ints, the padding of the bucket included"),
        ({"lens": [1, 1, 1, 1]}, "4 entries"),
        ({"lens": 3}, "3 is no list of ints"),
        ({"lens": [1, 2.0, 1]}, "is no list of ints"),
        ({"lens": [1, True, 1]}, "is no list of ints"),
        ({"lens": torch.tensor([1, 1, 1])}, "is no list of ints"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(fake: FakeNPU, lens: Tensor, step: dict[str, Any], phrase: str) -> None:
    _, tasks, _ = recorded(fake, {"lens": lens}, lambda: windows(lens))
    with pytest.raises(UsageError, match=phrase):
        tasks.check(step)
    assert "signal" not in fake.log


def test_an_op_that_fails_closes_its_group(fake: FakeNPU, lens: Tensor) -> None:
    def op(*args: Any, **kwargs: Any) -> None:
        if is_capturing():
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        recorded(fake, {"lens": lens}, lambda: updatable(op, host={"lengths": lens}, out=None))
    assert fake.group is None


def test_an_update_that_fails_closes_its_task(fake: FakeNPU, lens: Tensor) -> None:
    faults = list[int]()

    def op(*args: Any, **kwargs: Any) -> Any:
        if faults:
            raise ValueError("planted")
        return WINDOWS(*args, **kwargs)

    def fn() -> Tensor:
        result: Tensor = updatable(op, X, host={"lengths": lens}, out=X.new_empty(3))
        return result

    _, tasks, _ = recorded(fake, {"lens": lens}, fn)
    faults.append(1)
    with pytest.raises(ValueError, match="planted"):
        tasks.update(fake.Stream(), tasks.check({"lens": [0, 1, 1]}))
    assert not fake.modes and "signal" not in fake.log


def test_a_transform_that_fails_changes_no_task(fake: FakeNPU, lens: Tensor) -> None:
    def refuse(lengths: list[int]) -> list[int]:
        if lengths[0] == 13:
            raise ValueError("refused")
        return lengths

    graph, tasks, out = recorded(
        fake, {"lens": lens}, lambda: windows(lens) + 2 * windows(FromInputs(lens, transform=refuse))
    )
    tasks.update(fake.Stream(), tasks.check({"lens": [1, 1, 1]}))
    with pytest.raises(ValueError, match="refused"):
        tasks.update(fake.Stream(), tasks.check({"lens": [13, 2, 2]}))
    assert fake.log.count("update") == 2
    graph.replay()
    assert out.tolist() == [3 * each for each in expected(X, [1, 1, 1])]
