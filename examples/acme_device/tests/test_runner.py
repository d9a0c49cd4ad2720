"""The graph backend follows the protocol of `core.common.graphs.backend`."""

from __future__ import annotations

import pytest
import torch
from core.common.graphs.backend import GraphBackend, GraphKey
from core.errors import CaptureError

from core_acme.runner import RecordingBackend

SMALL, LARGE = GraphKey("decode", (1,)), GraphKey("decode", (2,))


class _Step:
    """One decode step in miniature: a cache row is written, the sum over the cache is the output."""

    def __init__(self, num_rows: int) -> None:
        self.inputs = {"row": torch.ones(num_rows, 2)}
        self.cache = torch.zeros(4, 2)
        self.num_calls = 0

    def __call__(self) -> tuple[torch.Tensor, ...]:
        self.num_calls += 1
        self.cache[: len(self.inputs["row"])].add_(self.inputs["row"])
        return (self.cache.sum(dim=0),)

    def reset(self) -> None:
        self.cache.zero_()


def _capture(backend: GraphBackend, key: GraphKey, step: _Step) -> tuple[torch.Tensor, ...]:
    with backend.capture_session():
        return backend.capture_one(key, step, step.inputs, step.reset)


def test_capture_warms_up_resets_and_leaves_no_trace() -> None:
    backend, step = RecordingBackend(), _Step(1)
    (out,) = _capture(backend, SMALL, step)
    assert step.num_calls == 2
    assert torch.equal(step.cache, torch.zeros(4, 2))
    assert out.isnan().all()


def test_replay_returns_the_static_outputs() -> None:
    backend, step = RecordingBackend(), _Step(1)
    captured = _capture(backend, SMALL, step)
    with backend.replay_session():
        for count in (1.0, 2.0):
            replayed = backend.replay(SMALL)
            assert all(a is b for a, b in zip(replayed, captured, strict=True))
            assert torch.equal(replayed[0], torch.full((2,), count))
    assert step.num_calls == 2, "a replay does not call Python again"


def test_keys_are_apart_and_unknown_ones_are_refused() -> None:
    backend, small, large = RecordingBackend(), _Step(1), _Step(2)
    with backend.capture_session():
        backend.capture_one(LARGE, large, large.inputs, large.reset)
        backend.capture_one(SMALL, small, small.inputs, small.reset)
    assert backend.can_run(SMALL) and backend.can_run(LARGE)
    assert torch.equal(backend.replay(LARGE)[0], torch.full((2,), 2.0))
    assert torch.equal(small.cache, torch.zeros(4, 2))
    with pytest.raises(CaptureError, match=r"prefill\[1\]\n  found: captured keys: decode\[2\], decode\[1\]"):
        backend.replay(GraphKey("prefill", (1,)))


def test_a_failed_capture_leaves_the_backend_usable() -> None:
    backend, step = RecordingBackend(), _Step(1)
    num_calls = 0

    def reads_at_capture() -> tuple[torch.Tensor, ...]:
        nonlocal num_calls
        num_calls += 1
        (out,) = step()
        return (out * out.sum().item() if num_calls == 2 else out,)

    with pytest.raises(CaptureError, match=r"\.item\(\)") as caught, backend.capture_session():
        backend.capture_one(SMALL, reads_at_capture, step.inputs, step.reset)
    assert caught.value.__notes__ == ["while capturing decode[1]"]
    assert not backend.can_run(SMALL)
    assert torch.equal(step.cache, torch.zeros(4, 2))
    _capture(backend, SMALL, step)
    assert torch.equal(backend.replay(SMALL)[0], torch.ones(2))


def test_capture_needs_one_open_session() -> None:
    backend, step = RecordingBackend(), _Step(1)
    with pytest.raises(CaptureError, match="no capture session is open"):
        backend.capture_one(SMALL, step, step.inputs, step.reset)
    with backend.capture_session(), pytest.raises(CaptureError, match="one is open already"), backend.capture_session():
        raise AssertionError("unreachable")


def test_cleanup_frees_graphs_and_allows_capture_again() -> None:
    backend, step = RecordingBackend(), _Step(1)
    (out,) = _capture(backend, SMALL, step)
    alive = torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage())
    del out
    assert not alive.expired()
    backend.cleanup()
    assert alive.expired()
    assert not backend.can_run(SMALL)
    _capture(backend, SMALL, step)
    assert backend.can_run(SMALL)


def test_parameters_that_require_gradients_build_no_autograd_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    backend = RecordingBackend()
    with backend.capture_session():
        (out,) = backend.capture_one(SMALL, lambda: (weight * 2,), {}, lambda: None)
    assert not out.requires_grad
    assert torch.equal(backend.replay(SMALL)[0], torch.full((2,), 2.0))
