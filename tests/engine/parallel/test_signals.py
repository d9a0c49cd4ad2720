"""core/engine/parallel/launch.py: signals that come while ranks are started."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from core.engine.parallel.launch import _SIGNALS, _held_back
from core.engine.parallel.rank import HANDLED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_ranks_are_known_whatever_threads_there_are(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in HANDLED]
    done = threading.Event()
    other = threading.Thread(target=done.wait)  # as numpy's: the signal is given to it where this one blocks it
    other.start()
    try:
        with _held_back() as allow:
            assert _SIGNALS in os.environ
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            with pytest.raises(SignalException) as caught:
                allow()
            assert caught.value.sigval == number
            allow()  # it comes once
            with pytest.raises(SignalException):
                os.kill(os.getpid(), number)
                time.sleep(5)
    finally:
        done.set()
        other.join()
    assert [signal.getsignal(each) for each in HANDLED] == before and _SIGNALS not in os.environ
