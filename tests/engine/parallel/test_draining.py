"""core/engine/parallel/launch.py: a first signal lets a server finish what runs, and ends what serves nothing yet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from core.engine.parallel.failures import RankState
from core.engine.parallel.launch import _Job


class Leader:
    """A process that notes the signals it is sent."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def send_signal(self, number: int) -> None:
        self.received.append(number)


def job(phase: str, ends: Iterator[Any]) -> Any:
    """Return a job of one rank in this phase; ends: what each wait for its end gives, or raises."""

    def wait(drained_by: float) -> int:
        given = next(ends)
        if isinstance(given, Exception):
            raise given
        return int(given)

    made: Any = object.__new__(_Job)
    made._processes = {0: Leader()}
    made._states, made._wait = lambda: [RankState(rank=0, phase=phase)], wait
    return made


def came(number: signal.Signals) -> SignalException:
    return SignalException("it came", number)


def test_a_server_that_serves_finishes_what_runs() -> None:
    serving = job("serve", iter([came(signal.SIGINT), 0]))
    assert serving.watch(30.0, lambda: None) == 0 and serving._processes[0].received == [signal.SIGTERM]


@pytest.mark.parametrize("phase", ["start", "load", "capture"])
def test_a_server_that_only_starts_ends_at_once(phase: str) -> None:
    starting = job(phase, iter([came(signal.SIGTERM)]))
    assert starting.watch(30.0, lambda: None) == 128 + signal.SIGTERM and not starting._processes[0].received
    with pytest.raises(KeyboardInterrupt):
        job(phase, iter([came(signal.SIGINT)])).watch(30.0, lambda: None)


def test_a_second_signal_ends_a_server_that_finishes() -> None:
    assert job("serve", iter([came(signal.SIGTERM)] * 2)).watch(30.0, lambda: None) == 128 + signal.SIGTERM
