"""core/common/graphs/backend.py: keys, and the backend of devices without graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.common.graphs.backend import CallBackend, GraphBackend, GraphKey

KEY = GraphKey("decode", (8, 4))


class Counting:
    """A bound callable that reads its buffer and counts its runs."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(2)
        self.runs = 0

    def __call__(self) -> tuple[Tensor, ...]:
        self.runs += 1
        return (self.buffer + 1,)


def test_a_key_reads_well_and_sorts_by_phase_and_size() -> None:
    assert str(KEY) == f"{KEY}" == "decode[8, 4]"
    assert GraphKey("decode", (8, 4)) == KEY and hash(KEY) == hash(GraphKey("decode", (8, 4)))
    guarded = KEY._replace(guards=(("lora", False), ("sampling", "greedy")), part=3)
    assert str(guarded) == "decode[8, 4, lora=False, sampling=greedy] part 3" and guarded != KEY
    assert GraphKey("prefill", (8, 4)) != KEY
    assert sorted([KEY, GraphKey("decode", (2, 9))])[0].dims == (2, 9)


def test_capture_runs_once_and_then_calls_back() -> None:
    backend: GraphBackend = CallBackend()
    fn = Counting()
    runs_at_callback: list[int] = []
    with backend.capture_session():
        (output,) = backend.capture_one(KEY, fn, {"x": fn.buffer}, lambda: runs_at_callback.append(fn.runs))
    assert runs_at_callback == [1] == [fn.runs]
    assert torch.equal(output, torch.ones(2))


def test_replay_reads_the_buffers_as_they_are_now() -> None:
    backend = CallBackend()
    fn = Counting()
    backend.capture_one(KEY, fn, {"x": fn.buffer}, lambda: None)
    fn.buffer.fill_(4)
    with backend.replay_session():
        assert torch.equal(backend.replay(KEY)[0], torch.full((2,), 5.0))
        assert torch.equal(backend.replay(KEY, step={"lens": [1]})[0], torch.full((2,), 5.0))
    assert fn.runs == 3


def test_only_captured_keys_run() -> None:
    backend = CallBackend()
    fn = Counting()
    backend.capture_one(KEY, fn, {}, lambda: None)
    assert backend.can_run(KEY)
    assert not backend.can_run(GraphKey("prefill", (8, 4)))
    with pytest.raises(KeyError):
        backend.replay(GraphKey("prefill", (8, 4)))


def test_a_failing_callable_is_not_kept() -> None:
    backend = CallBackend()

    def fails() -> tuple[Tensor, ...]:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        backend.capture_one(KEY, fails, {}, lambda: None)
    assert not backend.can_run(KEY)


def test_cleanup_drops_all_and_leaves_a_usable_backend() -> None:
    backend = CallBackend()
    backend.capture_one(KEY, Counting(), {}, lambda: None)
    backend.cleanup()
    assert not backend.can_run(KEY)
    backend.capture_one(KEY, Counting(), {}, lambda: None)
    assert backend.can_run(KEY)
