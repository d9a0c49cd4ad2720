"""core/compilation/capture/runner.py: sessions, keys, host-side arguments, serving, on any backend."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from core_acme.runner import RecordingBackend
from torch import Tensor

from core.common.collector import is_frozen, paused
from core.common.graphs.backend import CallBackend, GraphBackend, GraphKey
from core.compilation.capture.breaks import eager_break
from core.compilation.capture.runner import GraphRunner
from core.compilation.capture.watch import Watched
from core.errors import CaptureError, UsageError
from tests.recording import acme, graph_bytes
from tests.support import cpu, refused

KEY, OTHER = GraphKey("main", (4,)), GraphKey("main", (8,))


def runner(backend: GraphBackend | None = None, **options: Any) -> GraphRunner:
    return GraphRunner(acme(update=False), backend or RecordingBackend(), **options)


def capture(subject: GraphRunner, key: GraphKey = KEY, scale: float = 2.0, **options: Any) -> Tensor:
    """Capture x * scale under a key, for a buffer of ones, and return the buffer."""
    x = torch.ones(4)
    with subject.capture_session():
        subject.capture(key, lambda: (x * scale,), {"x": x}, **options)
    return x


class Updating(CallBackend):
    """A backend with one host-side argument per key, "lengths"."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[tuple[GraphKey, Mapping[str, Any]]] = []

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        return frozenset({"lengths"}) if key == KEY else frozenset()

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        self.updates.append((key, step))


@pytest.mark.parametrize("in_parts", [False, True])
def test_each_key_replays_its_own_graph(in_parts: bool) -> None:
    subject = runner()
    x, y = capture(subject, KEY, 2, in_parts=in_parts), capture(subject, OTHER, 5, in_parts=in_parts)
    x.fill_(3), y.fill_(4)
    assert subject.replay(KEY)[0].tolist() == [6] * 4
    assert subject.replay(OTHER)[0].tolist() == [20] * 4
    assert subject.replay(KEY)[0].tolist() == [6] * 4
    assert subject.keys == (KEY, OTHER) and subject.replays() == {KEY: 2, OTHER: 1}
    assert bool(subject.source(KEY)) is in_parts


def test_a_key_that_was_not_captured_is_refused() -> None:
    subject = runner()
    with refused(CaptureError, "replaying main[4]", "no keys"):
        subject.replay(KEY)
    capture(subject)
    for key in (OTHER, KEY._replace(guards=(("lora", True),)), KEY._replace(phase="verify"), KEY._replace(part=0)):
        with refused(CaptureError, f"replaying {key}", "captured are: main[4]"):
            subject.replay(key)
    assert subject.replays() == {KEY: 0}


@pytest.mark.parametrize("in_parts", [False, True])
def test_reset_runs_between_warm_up_and_capture_and_after(in_parts: bool) -> None:
    subject, count, order = runner(), torch.zeros(1), []

    def fn() -> tuple[Tensor, ...]:
        order.append("run")
        count.add_(1)
        return (count + 0,)

    def reset() -> None:
        order.append("reset")
        count.zero_()

    with subject.capture_session():
        subject.capture(KEY, fn, {}, in_parts=in_parts, reset=reset)
    assert order[-3:] == ["reset", "run", "reset"] and order[0] == "run" and order.count("reset") == 2
    assert float(count) == 0
    assert [float(subject.replay(KEY)[0]) for _ in range(3)] == [1, 2, 3]


def test_what_a_capture_took_is_told() -> None:
    @eager_break
    def step(x: Tensor) -> Tensor:
        return x + 1

    subject = runner()
    with subject.capture_session():
        _, whole = subject.capture(KEY, lambda: (torch.ones(64) * 2,), {})
        _, parts = subject.capture(OTHER, lambda: (step(torch.ones(64)) * 2,), {}, in_parts=True)
    assert (whole.num_graphs, whole.eager, whole.num_bytes) == (1, (), 2 * 64 * 4)
    assert (parts.num_graphs, len(parts.eager)) == (2, 1) and parts.num_bytes >= 3 * 64 * 4
    assert whole.capture_s > 0


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_failing_capture_names_its_key_and_loses_nothing(in_parts: bool) -> None:
    subject = runner()
    x = capture(subject, OTHER, 5)
    level = graph_bytes()
    runs: list[int] = []

    def fails() -> tuple[Tensor, ...]:
        runs.append(1)
        if len(runs) > 1:
            raise RuntimeError("no kernel")
        return (torch.ones(2),)

    with refused(CaptureError, "capturing main[4] on acme", "RuntimeError: no kernel"), subject.capture_session():
        subject.capture(KEY, fails, {}, in_parts=in_parts)
    assert subject.keys == (OTHER,) and graph_bytes() == level
    x.fill_(2)
    assert subject.replay(OTHER)[0].tolist() == [10] * 4
    capture(subject, KEY, 3)
    assert subject.replay(KEY)[0].tolist() == [3] * 4


def test_a_failing_second_capture_of_a_key_leaves_no_mixture_of_both() -> None:
    @eager_break
    def step(x: Tensor) -> Tensor:
        return x + 1

    subject, x, broken = runner(), torch.ones(4), [False]

    def fn() -> tuple[Tensor, ...]:
        y = step(x * 2)
        if broken[0]:
            y.tolist()
        return (y * 2,)

    with subject.capture_session():
        subject.capture(KEY, fn, {"x": x}, in_parts=True)

    def arm() -> None:
        broken[0] = True

    with refused(CaptureError, "capture of"), subject.capture_session():
        subject.capture(KEY, fn, {"x": x}, in_parts=True, reset=arm)
    with refused(CaptureError, "replaying main[4]"):
        subject.replay(KEY)


def test_a_failing_reset_is_a_capture_that_failed() -> None:
    def reset() -> None:
        raise ValueError("no such cache")

    subject = runner()
    with refused(CaptureError, "capturing main[4]", "ValueError: no such cache"):
        capture(subject, reset=reset)
    assert subject.keys == ()


def test_memory_is_back_after_cleanup_and_the_runner_captures_again() -> None:
    level, subject = graph_bytes(), runner()
    capture(subject)
    assert graph_bytes() > level
    subject.cleanup()
    assert graph_bytes() == level and subject.keys == ()
    x = capture(subject, scale=7)
    x.fill_(2)
    assert subject.replay(KEY)[0].tolist() == [14] * 4
    subject.cleanup()
    subject.cleanup()
    assert graph_bytes() == level


def test_a_capture_while_serving_is_refused() -> None:
    subject = runner()
    capture(subject)
    with subject.serving():
        with refused(CaptureError, "capturing on acme", "is serving"):
            capture(subject, OTHER)
        with subject.serving():
            pass
        with refused(CaptureError, "is serving"):
            capture(subject, OTHER)
        assert subject.replay(KEY)[0].tolist() == [2] * 4
    capture(subject, OTHER)
    assert subject.keys == (KEY, OTHER)


@pytest.mark.parametrize(
    ("backend", "collects"), [(CallBackend(), False), (Updating(), True), (RecordingBackend(), True)]
)
def test_only_captures_of_graphs_begin_with_a_collection(backend: GraphBackend, collects: bool) -> None:
    subject, seen = runner(backend), list[int]()

    def note(phase: str, info: Mapping[str, int]) -> None:
        seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with paused():  # no collection but those that are asked for
            capture(subject)
    finally:
        gc.callbacks.remove(note)
    assert (2 in seen) is collects


def test_serving_ends_with_an_error_too() -> None:
    subject = runner()
    with pytest.raises(ValueError, match="request"), subject.serving():
        raise ValueError("request")
    capture(subject)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_frozen")
def test_the_collector_is_off_while_capturing_and_as_before_afterwards() -> None:
    subject, seen = runner(), []
    with subject.capture_session():
        subject.capture(KEY, lambda: (seen.append((gc.isenabled(), is_frozen())), torch.ones(1))[1:], {})
    assert set(seen) == {(False, True)} and gc.isenabled() and not is_frozen()
    gc.disable()
    try:
        capture(subject, OTHER)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_backend_without_segments_says_so() -> None:
    subject = GraphRunner(cpu(), CallBackend())
    with refused(CaptureError, "main[4] in parts", "CallBackend has no `segment`", "'full' or 'off'"):
        capture(subject, in_parts=True)


@pytest.mark.parametrize("step", [None, {}, {"lens": [1]}, {"lengths": [1], "more": 2}])
def test_a_step_names_exactly_the_host_arguments(step: Mapping[str, Any] | None) -> None:
    backend = Updating()
    subject = GraphRunner(acme(update=True), backend)
    capture(subject)
    with refused(UsageError, "replaying main[4] with host-side arguments", "captured with: lengths", "step="):
        subject.replay(KEY, step)
    assert backend.updates == [] and subject.replays() == {KEY: 0}
    assert subject.replay(KEY, {"lengths": [1]})[0].tolist() == [2] * 4
    assert backend.updates == [(KEY, {"lengths": [1]})]


def test_a_step_where_none_was_captured_is_refused() -> None:
    updating, plain = GraphRunner(acme(update=True), Updating()), runner()
    for subject in (updating, plain):
        capture(subject, OTHER)
        with refused(UsageError, "['lengths']", "captured with: none"):
            subject.replay(OTHER, {"lengths": [1]})
        subject.replay(OTHER), subject.replay(OTHER, {})


def test_debug_refuses_memory_that_has_moved() -> None:
    owner = {"w": torch.ones(2)}
    watched = [Watched("layer.w", lambda: owner["w"], owner["w"].data_ptr())]
    checked, plain = runner(debug=True), runner()
    capture(checked, watched=watched), capture(plain, watched=watched)
    owner["w"].add_(1)
    checked.replay(KEY)
    owner["w"] = owner["w"].clone()
    with refused(CaptureError, "replaying main[4]", "layer.w lies at", "in place"):
        checked.replay(KEY)
    plain.replay(KEY)
    assert checked.replays() == {KEY: 1}
