"""SIGTERM ends a command that measures as Ctrl-C does: it reports what it has, and its exit code says so."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from core.cli.values import checked
from core.engine.parallel.interrupts import EXIT_TERMINATED, Terminated, interrupted_by_sigterm


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_interrupts_inside_and_ends_the_process_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), interrupted_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) != before
        try:
            terminate()
        finally:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second one is not held up"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_launched_process_and_a_thread_keep_their_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def note() -> None:
        with interrupted_by_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    monkeypatch.setattr("core.engine.parallel.interrupts.is_launched", lambda: True)
    note()
    assert seen == [before, before]


def test_the_exit_code_says_that_sigterm_came(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        with interrupted_by_sigterm():
            terminate()
        return 0

    assert checked(command)() == EXIT_TERMINATED
    assert capsys.readouterr().err == "core: ended by SIGTERM\n"
