"""Segments: recordings that begin and end in the middle of running code, and what parts of one key share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from core.common.graphs.backend import GraphKey
from core.errors import CaptureError
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from core_acme.runner import RecordingBackend

WHOLE, OTHER = GraphKey("prefill", (4,)), GraphKey("prefill", (8,))
FIRST, SECOND = WHOLE._replace(part=0), WHOLE._replace(part=1)


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    with torch.no_grad():
        yield
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not torch.overrides._get_current_function_mode_stack()
    assert not is_in_torch_dispatch_mode()
    assert torch.ones(2).sum().item() == 2


class Model:
    """Counts its steps, doubles x, leaves the middle to the host, and adds the counter."""

    def __init__(self) -> None:
        self.x, self.steps = torch.arange(4.0), torch.zeros(1)
        self.middle = torch.empty(0)

    def before(self) -> None:
        self.steps.add_(1)
        self.doubled = self.x * 2
        self.middle = torch.empty(4)

    def eager(self) -> None:
        self.middle.copy_(torch.tensor(sorted(self.doubled.tolist(), reverse=True)))

    def after(self) -> None:
        self.doubled.add_(self.middle)
        self.out = self.doubled + self.steps

    def expected(self, steps: int) -> torch.Tensor:
        return self.x * 2 + (self.x * 2).sort(descending=True).values + steps


def capture(backend: RecordingBackend, model: Model, whole: GraphKey = WHOLE) -> None:
    """Capture as a runner does: begin and end by hand, each part replayed as soon as it is recorded."""
    with backend.capture_session():
        segment = backend.segment(whole._replace(part=0))
        segment.__enter__()
        model.before()
        segment.__exit__(None, None, None)
        assert model.doubled.isnan().all() and model.steps.item() == 0
        assert backend.replay(whole._replace(part=0)) == ()
        model.eager()
        segment = backend.segment(whole._replace(part=1))
        segment.__enter__()
        model.after()
        segment.__exit__(None, None, None)
        # What the first part made existed before the second: its writes are undone, and it is not poisoned.
        assert torch.equal(model.doubled, model.x * 2)
        assert model.out.isnan().all()
        backend.replay(whole._replace(part=1))


def replay(backend: RecordingBackend, model: Model, whole: GraphKey = WHOLE) -> torch.Tensor:
    backend.replay(whole._replace(part=0))
    model.eager()
    backend.replay(whole._replace(part=1))
    return model.out


def test_parts_with_an_eager_break_give_the_models_results() -> None:
    backend, model = RecordingBackend(), Model()
    capture(backend, model)
    assert torch.equal(model.out, model.expected(1)), "the capture is a run for real"
    address = model.out.data_ptr()
    for step in (2, 3, 4):
        model.x.copy_(torch.randn(4))
        assert torch.equal(replay(backend, model), model.expected(step))
    assert model.out.data_ptr() == address
    assert backend.can_run(FIRST) and backend.can_run(SECOND) and not backend.can_run(WHOLE)


def test_an_exception_in_the_second_segment_abandons_it_alone() -> None:
    backend, model = RecordingBackend(), Model()
    with pytest.raises(ZeroDivisionError, match="mine"), backend.capture_session():
        with backend.segment(FIRST):
            model.before()
        backend.replay(FIRST)
        with backend.segment(SECOND):
            model.doubled.add_(100)
            model.x.add_(100)
            raise ZeroDivisionError("mine")
    assert torch.equal(model.x, torch.arange(4.0))
    assert torch.equal(model.doubled, model.x * 2)
    assert backend.can_run(FIRST) and not backend.can_run(SECOND)
    model.steps.zero_()
    capture(backend, model)
    assert torch.equal(replay(backend, model), model.expected(2))


def test_an_exception_handed_over_by_hand_abandons_too() -> None:
    backend, x = RecordingBackend(), torch.zeros(2)
    with backend.capture_session():
        segment = backend.segment(FIRST)
        segment.__enter__()
        x.add_(1)
        error = KeyboardInterrupt()
        assert not segment.__exit__(type(error), error, None)
        assert torch.equal(x, torch.zeros(2))
        assert not backend.can_run(FIRST)
        with backend.segment(FIRST):
            x.add_(1)
    backend.replay(FIRST)
    assert torch.equal(x, torch.ones(2))


def test_a_host_read_in_a_segment_names_its_key() -> None:
    backend = RecordingBackend()
    with backend.capture_session(), pytest.raises(CaptureError, match=r"\.item\(\)") as caught, backend.segment(SECOND):
        torch.ones(1).item()
    assert caught.value.__notes__ == ["while capturing prefill[4] part 1"]


def test_a_session_that_ends_within_a_segment_abandons_it() -> None:
    backend, x = RecordingBackend(), torch.zeros(2)
    with pytest.raises(CaptureError, match="a segment is still being recorded"), backend.capture_session():
        segment = backend.segment(FIRST)
        segment.__enter__()
        x.add_(1)
    assert torch.equal(x, torch.zeros(2))
    with pytest.raises(CaptureError, match="it was abandoned before"):
        segment.__exit__(None, None, None)
    assert not backend.can_run(FIRST)


def test_an_exception_past_an_open_segment_is_not_covered_up() -> None:
    backend = RecordingBackend()
    with pytest.raises(ZeroDivisionError), backend.capture_session():
        segment = backend.segment(FIRST)
        segment.__enter__()
        _ = 1 / 0


def test_captures_and_replays_within_a_recording_are_refused() -> None:
    backend, other, x = RecordingBackend(), RecordingBackend(), torch.ones(2)
    ran = []
    with backend.capture_session(), other.capture_session():
        with other.segment(FIRST):
            x.add_(1)
        for attempt in (
            lambda: backend.segment(SECOND).__enter__(),
            lambda: other.segment(SECOND).__enter__(),
            lambda: other.capture_one(SECOND, lambda: (ran.append(1), ())[1], {}, lambda: None),
            lambda: other.replay(FIRST),
        ):
            with backend.segment(FIRST):
                with pytest.raises(CaptureError, match="this thread is recording a graph"):
                    attempt()
                x.mul_(3)
    backend.replay(FIRST)
    other.replay(FIRST)
    assert torch.equal(x, torch.full((2,), 4.0))
    assert not ran, "a refused capture runs nothing"
    with pytest.raises(CaptureError, match="no capture session is open"), backend.segment(FIRST):
        raise AssertionError("unreachable")


class Passing(TorchDispatchMode):
    """A dispatch mode of the model's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return func(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    """A function mode of the model's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scope", [lambda: torch.device("cpu"), Passing, PassingFunctions, torch.inference_mode])
def test_scopes_of_the_model_may_cross_the_ends_of_a_segment(scope: Callable[[], object]) -> None:
    backend, x = RecordingBackend(), torch.ones(2)

    @contextmanager
    def entered() -> Iterator[None]:
        with scope():  # type: ignore[attr-defined]
            yield

    with backend.capture_session():
        first, second = backend.segment(FIRST), backend.segment(SECOND)
        within = entered()
        first.__enter__()
        y = x * 2
        within.__enter__()
        y = y + 1
        first.__exit__(None, None, None)
        backend.replay(FIRST)
        value = y.tolist()
        second.__enter__()
        z = y * 2
        within.__exit__(None, None, None)
        z = z + x
        second.__exit__(None, None, None)
    assert value == [3, 3]
    x.fill_(2)
    backend.replay(FIRST)
    backend.replay(SECOND)
    assert torch.equal(z, torch.full((2,), 12.0))


def test_the_default_device_may_change_while_recording() -> None:
    backend, x = RecordingBackend(), torch.ones(2)
    try:
        torch.set_default_device("cpu")
        with backend.capture_session(), backend.segment(FIRST):
            y = x * 2 + torch.ones(2)
            torch.set_default_device("cpu:0")
            torch.set_default_device(None)
            y = y * x
        assert y.isnan().all()
    finally:
        torch.set_default_device(None)
    backend.replay(FIRST)
    assert y.tolist() == [3, 3]


def test_segments_in_two_threads_record_their_own_calls() -> None:
    both, results = threading.Barrier(2, timeout=20), {}

    def work(name: int) -> None:
        backend, x = RecordingBackend(), torch.full((2,), float(name))
        with torch.no_grad(), backend.capture_session(), backend.segment(FIRST):
            both.wait()
            for _ in range(20):
                x.add_(name)
            both.wait()
        backend.replay(FIRST)
        results[name] = (x.tolist(), len(backend._graphs[FIRST].tape.calls))

    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {1: ([21, 21], 20), 2: ([42, 42], 20)}


def test_recordings_that_end_crosswise_leave_torch_as_it_was() -> None:
    begun, ended = threading.Event(), threading.Event()

    def second() -> None:
        backend = RecordingBackend()
        with backend.capture_session(), backend.segment(FIRST):
            begun.set()
            ended.wait(timeout=20)

    backend, thread = RecordingBackend(), threading.Thread(target=second)
    with backend.capture_session(), backend.segment(FIRST):
        thread.start()
        assert begun.wait(timeout=20)
    ended.set()
    thread.join(timeout=20)
    # torch keeps these for the process: one that stays set makes torch.compile run eagerly from then on.
    marks = {name: mark for name, mark in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    assert marks and not any(marks.values()), marks


def test_a_thread_may_work_while_another_records() -> None:
    backend, done = RecordingBackend(), []
    with backend.capture_session(), backend.segment(FIRST):
        thread = threading.Thread(target=lambda: done.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join(timeout=20)
    assert done == [3]
    assert not backend._graphs[FIRST].tape.calls


def test_results_expire_when_another_key_is_replayed() -> None:
    backend, x, state = RecordingBackend(), torch.ones(2), torch.zeros(2)
    small, large = GraphKey("decode", (1,)), GraphKey("decode", (2,))
    with backend.capture_session():
        own, view, alias, flag = backend.capture_one(
            small, lambda: (x * 2, (x * 3)[:1], state.view(1, 2), x > 0), {"x": x}, lambda: None
        )
        (other,) = backend.capture_one(large, lambda: (x * 5,), {"x": x}, lambda: None)
    backend.replay(small)
    backend.replay(small)
    assert own.tolist() == [2, 2]
    kept = own.clone()
    backend.replay(large)
    assert own.isnan().all() and view.isnan().all() and not flag.any()
    assert torch.equal(alias, torch.zeros(1, 2)) and torch.equal(x, torch.ones(2)), "not the graph's own memory"
    assert other.tolist() == [5, 5]
    backend.replay(small)
    assert torch.equal(own, kept) and view.tolist() == [3] and flag.all() and other.isnan().all()


def test_parts_of_a_key_expire_together_and_never_each_other() -> None:
    backend, model, second = RecordingBackend(), Model(), Model()
    capture(backend, model)
    capture(backend, second, OTHER)
    assert torch.equal(replay(backend, model), model.expected(2))
    assert torch.equal(model.middle, (model.x * 2).sort(descending=True).values)
    replay(backend, second, OTHER)
    assert model.out.isnan().all() and model.doubled.isnan().all()
    assert model.steps.item() == 2
    assert torch.equal(second.out, second.expected(2))
    assert torch.equal(replay(backend, model), model.expected(3))


def test_outputs_of_parts_captured_as_callables_expire_with_their_key() -> None:
    backend, x = RecordingBackend(), torch.ones(2)
    with backend.capture_session():
        (half,) = backend.capture_one(FIRST, lambda: (x * 2,), {"x": x}, lambda: None)
        (out,) = backend.capture_one(SECOND, lambda: (half + 1,), {}, lambda: None)
        backend.capture_one(OTHER, lambda: (x * 0,), {"x": x}, lambda: None)
    for _ in range(2):
        backend.replay(FIRST)
        backend.replay(SECOND)
        assert half.tolist() == [2, 2] and out.tolist() == [3, 3]
        backend.replay(OTHER)
        assert half.isnan().all() and out.isnan().all()


def test_capturing_a_part_again_replaces_it_and_what_came_after() -> None:
    backend, model, again = RecordingBackend(), Model(), Model()
    capture(backend, model)
    with backend.capture_session(), backend.segment(FIRST):
        again.before()
    assert backend.can_run(FIRST) and not backend.can_run(SECOND), "the second part reads memory of the old first"
    again = Model()
    capture(backend, again)
    assert torch.equal(replay(backend, again), again.expected(2))


def test_what_a_segment_made_outlives_the_code_that_made_it() -> None:
    backend, x, total = RecordingBackend(), torch.ones(1000), torch.zeros(())
    with backend.capture_session():
        with backend.segment(FIRST):
            kept = [x * n for n in range(10)]
        with backend.segment(SECOND):
            for tensor in kept:
                total.add_(tensor.sum())
            del tensor
    kept.clear()
    gc.collect()
    noise = [torch.full((1000,), -1.0) for _ in range(20)]
    backend.replay(FIRST)
    backend.replay(SECOND)
    assert total.item() == 45_000
    del noise
