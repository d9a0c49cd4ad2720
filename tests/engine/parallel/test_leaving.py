"""core/engine/parallel/rank.py: a rank leaves the groups that it has joined, in bounded time, and no others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from torch import distributed

from core.cli import ranks
from core.engine.models.distributed import Processes
from core.engine.parallel import rank


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of two ranks as a launcher starts it, whose group has one member."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("core.engine.parallel.cores.pin", lambda *_: "")

    def initialize(backend: str, *, timeout_s: float) -> Processes:
        if not distributed.is_initialized():
            distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
        return Processes(rank=0, size=2, local_rank=0)

    monkeypatch.setattr("core.engine.models.distributed.initialize", initialize)
    yield
    rank._joined.clear()
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_leaves_at_its_end_whatever_its_exit_code(job: None, code: int) -> None:
    rank.open_device("cpu", timeout_s=5)
    assert distributed.is_initialized()
    assert ranks.end(code) == code
    assert not distributed.is_initialized()
    assert ranks.end(code) == code  # nothing is left to leave


def test_a_group_that_was_there_stays(group: None, job: None) -> None:
    rank.open_device("cpu", timeout_s=5)
    ranks.end(0)
    assert distributed.is_initialized()


def test_others_that_do_not_come_hold_nobody_up(
    job: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank.open_device("cpu", timeout_s=5)
    ended, destroy = threading.Event(), distributed.destroy_process_group
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: ended.wait(30))
    monkeypatch.setattr(rank, "LEAVE_S", 0.1)
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        assert ranks.end(2) == 2
    assert time.perf_counter() - start < 5 and "were not left within 0.1 s" in caplog.text
    ended.set()
    destroy()


def test_an_error_while_leaving_is_said_and_no_more(
    job: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a peer is gone")

    rank.open_device("cpu", timeout_s=5)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(distributed, "destroy_process_group", fail)
        assert ranks.end(0) == 0
    assert "can't be left: RuntimeError: a peer is gone" in caplog.text
