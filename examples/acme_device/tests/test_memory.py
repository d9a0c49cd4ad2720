"""The allocator account: exactly what live tapes hold, and zero when they are gone."""

from __future__ import annotations

import threading

import torch
from core.common.graphs.backend import GraphKey
from core.common.graphs.tape import Tape

from core_acme.memory import CARD, TOTAL_BYTES, Account
from core_acme.runner import RecordingBackend

FIRST, SECOND = GraphKey("decode", (1,)), GraphKey("decode", (2,))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).add_(torch.empty(4).zero_().sum())


def capture(backend: RecordingBackend, key: GraphKey, x: torch.Tensor) -> None:
    with backend.capture_session():
        backend.capture_one(key, lambda: (doubled(x),), {"x": x}, lambda: None)


def test_the_account_is_exact_and_returns_to_zero() -> None:
    before = CARD.read()
    CARD.reset_peak()
    backend, other, x = RecordingBackend(), RecordingBackend(), torch.ones(100)
    graph = 400 + 16 + 4  # the product, the empty tensor, its sum; x is the host's
    capture(backend, FIRST, x)
    assert CARD.read().used_bytes - before.used_bytes == graph
    capture(other, FIRST, x)
    capture(backend, SECOND, x)
    backend.replay(FIRST)
    assert CARD.read().used_bytes - before.used_bytes == 3 * graph
    backend.cleanup()
    assert CARD.read().used_bytes - before.used_bytes == graph
    assert CARD.read().peak_bytes - before.used_bytes == 3 * graph
    other.cleanup()
    after = CARD.read()
    assert after.used_bytes == before.used_bytes
    CARD.reset_peak()
    assert CARD.read().peak_bytes == after.used_bytes
    assert after.total_bytes == TOTAL_BYTES


def test_a_key_captured_again_gives_the_old_memory_back() -> None:
    before = CARD.read().used_bytes
    backend = RecordingBackend()
    for size in (10, 1000, 10, 10):
        capture(backend, FIRST, torch.ones(size))
        assert CARD.read().used_bytes - before == 4 * size + 20
    del backend
    assert CARD.read().used_bytes == before, "a backend that is let go cleans up"


def test_an_abandoned_recording_holds_nothing() -> None:
    before = CARD.read().used_bytes
    backend = RecordingBackend()
    try:
        with backend.capture_session(), backend.segment(FIRST):
            torch.ones(100).item()
    except Exception:
        assert CARD.read().used_bytes == before


def test_the_account_may_be_read_while_other_threads_capture() -> None:
    account, failures = Account(), []

    def work() -> None:
        try:
            for _ in range(300):
                tape = Tape(num_bytes=1)
                account.add(tape)
                assert 1 <= account.read().used_bytes <= 4
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    assert account.read().used_bytes == 0
