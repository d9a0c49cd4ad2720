"""Starts the ranks of a job on this machine, watches them, and ends them together.

torch.distributed.elastic starts and ends the processes, each in a session of its own. Its own watching is not used: it
ends all ranks at the first bad exit code, before the others can tell who is at fault.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core.engine.parallel.failures import RankState, failure, has_culprit
from core.engine.parallel.rank import HANDLED, LAUNCHED
from core.errors import UsageError

_HOST = "127.0.0.1"
_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Names the signals of which torch's launcher makes exceptions, from before the first rank is started."""
_POLL_S = 0.05
_GRACE_S = 2.0
"""How long ranks may take to tell more, once one of them said that it waited for another."""
_MORE_S = 0.3
"""How long, once a culprit is known: several may have failed at once."""
_CLOSE_S = 20.0
"""How long ranks may take to close, once rank 0 has done its work."""
_TERM_S = 3
"""How long ranks may take to end after SIGTERM, before they are killed."""
_LAST_BYTES = 2000


def run_ranks(
    arguments: Sequence[str], size: int, *, asked: str, timeout_s: float, drain_timeout_s: float | None = None
) -> int:
    """Run `python -m core` with these arguments on `size` ranks; return the exit code of rank 0.

    Rank 0 has this process's standard output and error, the others write to files that are removed. asked: what the
    job is, for messages. timeout_s: how long a rank waits for the others. drain_timeout_s: rank 0 may finish what runs
    for so long after a signal, once it serves; None ends all at once. All ranks and what they started have ended when
    this returns. Raises the `CoreError` that names the rank that failed. For the main thread.
    """
    with _held_back() as allow, _folder() as folder:
        job = _Job(arguments, size, folder, asked, timeout_s)
        try:
            return job.watch(drain_timeout_s, allow)
        finally:
            job.close()


class _Job:
    """Ranks that run."""

    def __init__(self, arguments: Sequence[str], size: int, folder: Path, asked: str, timeout_s: float) -> None:
        from torch import distributed
        from torch.distributed.elastic import multiprocessing

        self._asked, self._timeout_s, self._size = asked, timeout_s, size
        self._failed: list[int] = []
        try:
            # This process opens the store: a port that is chosen now and opened later might be taken in between.
            # torch documents the class there, and does not list it in the package's stubs.
            store: Any = distributed.TCPStore  # type: ignore[attr-defined]
            self._store = store(_HOST, 0, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            found = f"no port for the ranks to meet: {error}"
            raise UsageError(f"{asked} on {size} ranks", found=found, remedy="see the machine's network") from error
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        for name in ("api", "redirects"):
            logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
        others = dict.fromkeys(range(1, size), multiprocessing.Std.ALL)
        started: Any = multiprocessing.start_processes(
            name="core",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(size), ("-P", "-m", "core", *arguments)),
            envs={rank: self._environment(rank) for rank in range(size)},
            logs_specs=multiprocessing.DefaultLogsSpecs(log_dir=str(folder), redirects=others),
        )
        self._context = started
        self._processes = {rank: each.proc for rank, each in vars(started)["subprocess_handlers"].items()}

    def watch(self, drain_timeout_s: float | None, allow: Callable[[], None]) -> int:
        """Wait until the ranks have ended; return the exit code of rank 0, or raise the error that names who failed.

        allow: lets signals come.
        """
        from torch.distributed.elastic.multiprocessing import SignalException

        drained_by = 0.0
        while True:
            try:
                allow()
                return self._wait(drained_by)
            except SignalException as received:
                if drain_timeout_s is None or drained_by or self._states()[0].phase != "serve":
                    return self._interrupted(received.sigval)
                drained_by = time.monotonic() + drain_timeout_s + _CLOSE_S
                self._processes[0].send_signal(signal.SIGTERM)

    def _wait(self, drained_by: float) -> int:
        """drained_by: when a job that was told to stop must have ended; 0.0 for one that runs."""
        done_s = 0.0
        while True:
            states = self._states()
            if any(state.failed for state in states) and not drained_by:
                raise self._failure(states)
            ended = all(state.code is not None for state in states)
            leader = states[0].outcome
            if leader is not None and not done_s:
                done_s = time.monotonic()
            late = (done_s and time.monotonic() > done_s + _CLOSE_S) or (drained_by and time.monotonic() > drained_by)
            if ended or late:
                return int((leader or {}).get("code", 1 if not drained_by else 0))
            time.sleep(_POLL_S)

    def _failure(self, states: Sequence[RankState]) -> Exception:
        """Let the ranks tell what they know, and return the error; who failed first comes first."""
        self._note(states)
        deadline = time.monotonic() + _GRACE_S
        while not has_culprit(states) and time.monotonic() < deadline and any(not s.failed for s in states):
            time.sleep(_POLL_S)
            states = self._states()
            self._note(states)
        time.sleep(_MORE_S)
        states = self._states()
        self._note(states)
        order = [*self._failed, *(rank for rank in range(self._size) if rank not in self._failed)]
        return failure(self._asked, [states[rank] for rank in order], self._timeout_s)

    def _note(self, states: Sequence[RankState]) -> None:
        self._failed += [state.rank for state in states if state.failed and state.rank not in self._failed]

    def _interrupted(self, received: signal.Signals) -> int:
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        return 128 + int(received)

    def close(self) -> None:
        """End all ranks and everything that they started, and give the port back."""
        # A second signal must not interrupt this.
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
        self._context.close(signal.SIGTERM, timeout=_TERM_S)
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        del self._store

    def _states(self) -> list[RankState]:
        # The exit code first: what a rank tells, it tells before it ends.
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return [self._state(rank, codes[rank]) for rank in range(self._size)]

    def _state(self, rank: int, code: int | None) -> RankState:
        folder = Path(self._context.error_files[rank]).parent
        told, phase = _text(folder / "outcome"), _text(folder / "phase")
        words = _text(folder / "stderr.log", _LAST_BYTES).strip() if rank else ""
        return RankState(
            rank=rank,
            phase=phase or "start",
            code=code,
            outcome=json.loads(told) if told else None,
            last_words=words,
        )

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": f"{LAUNCHED}{os.getpid()}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder, which is removed even where this process is killed: by one that waits for its end."""
    with tempfile.TemporaryDirectory(prefix="core-ranks-") as folder:
        remover = subprocess.Popen(
            ["sh", "-c", 'cat > /dev/null; rm -rf -- "$1"', "sh", folder],
            stdin=subprocess.PIPE,  # ends when nobody can write there any more, and this process alone can
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Path(folder)
        finally:
            remover.communicate()


@contextmanager
def _held_back() -> Iterator[Callable[[], None]]:
    """Let signals raise `SignalException` of torch, but none before the function that is yielded was called: ranks
    would be left that nobody knows yet.

    Blocking them would not do: the operating system then gives them to another thread, such as those of numpy.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    pending: list[int] = []

    def received(number: int, frame: object) -> None:
        raise SignalException(f"signal {number} came", signal.Signals(number))

    def allow() -> None:
        for number in HANDLED:
            signal.signal(number, received)
        if pending:
            first = pending[0]
            pending.clear()
            received(first, None)

    handlers = {number: signal.signal(number, lambda number, _: pending.append(number)) for number in HANDLED}
    before = os.environ.get(_SIGNALS)
    os.environ[_SIGNALS] = "SIGURG"  # it wants a name, and this one comes to nobody here
    try:
        yield allow
    finally:
        del os.environ[_SIGNALS]
        os.environ.update({_SIGNALS: before} if before is not None else {})
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _text(file: Path, last_bytes: int = 0) -> str:
    with suppress(OSError):
        return file.read_bytes()[-last_bytes:].decode(errors="replace")
    return ""
