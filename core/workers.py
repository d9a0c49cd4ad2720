"""Short-lived worker processes, all at once, each with a deadline: a vendor's crash or hang stays outside this one."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

_OUTPUT_TAIL_BYTES = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """What became of one worker.

    answer: the JSON object it sent, or None. problem: why there is none, as a verb phrase. output: the tail of what it
    printed, both streams.
    """

    answer: dict[str, Any] | None
    problem: str = ""
    output: str = ""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    timeout_s: float
    answer: bytes = b""
    output: bytes = b""
    open_streams: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return b"\n" in self.answer or not self.open_streams


class WorkerPool:
    """Launches workers and collects their answers; leaving the context kills whatever still runs."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def launch(self, key: str, module: str, argument: str, *, timeout_s: float) -> None:
        """Start `python -m module argument`, whose answer will be found under `key`."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # one group to kill, with everything that the worker started
        )
        worker = _Worker(process, time.monotonic() + timeout_s, timeout_s)
        self._workers[key] = worker
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            worker.open_streams.add(stream.fileno())
            self._selector.register(stream, selectors.EVENT_READ, worker)

    def collect(self) -> dict[str, WorkerResult]:
        """Wait for every worker's answer, end or deadline, and return the results by key."""
        pending = set(self._workers)
        results: dict[str, WorkerResult] = {}
        while pending:
            now = time.monotonic()
            for key in sorted(pending):
                worker = self._workers[key]
                if worker.done or now >= worker.deadline:
                    results[key] = _finish(worker)
                    self._forget(worker)
                    pending.discard(key)
            if pending:
                self._read(min(self._workers[key].deadline for key in pending) - now)
        return results

    def _read(self, timeout_s: float) -> None:
        for ready, _ in self._selector.select(max(timeout_s, 0.0)):
            worker: _Worker = ready.data
            chunk = os.read(ready.fd, 65_536)
            if not chunk:
                self._selector.unregister(ready.fileobj)
                worker.open_streams.discard(ready.fd)
            elif ready.fileobj is worker.process.stdout:
                worker.answer += chunk
            else:
                worker.output = (worker.output + chunk)[-_OUTPUT_TAIL_BYTES:]

    def _forget(self, worker: _Worker) -> None:
        for stream in (worker.process.stdout, worker.process.stderr):
            assert stream is not None
            if stream.fileno() in worker.open_streams:
                self._selector.unregister(stream)
            stream.close()
        worker.open_streams.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            if worker.process.returncode is None:
                _kill(worker.process)
                self._forget(worker)
        self._selector.close()


def _environment() -> dict[str, str]:
    """Return the environment in which a worker finds the same modules as this process, and nothing of the folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _finish(worker: _Worker) -> WorkerResult:
    if b"\n" in worker.answer:
        # Killed before it is reaped, while its process group's number cannot have been given to another one.
        _kill(worker.process)
        answer = _parsed(worker.answer)
        problem = "" if answer is not None else "sent something else than an answer"
        return WorkerResult(answer=answer, problem=problem, output=_text(worker))
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(timeout=max(0.0, worker.deadline - time.monotonic()))
    code = worker.process.returncode
    _kill(worker.process)
    if code is None:
        problem = f"gave no answer within {worker.timeout_s:g} s and was killed"
    elif code < 0:
        problem = f"crashed with {_signal_name(-code)}"
    else:
        problem = f"ended with exit code {code} and no answer"
    return WorkerResult(answer=None, problem=problem, output=_text(worker))


def _parsed(sent: bytes) -> dict[str, Any] | None:
    """Return the JSON object in the first line, or None: foreign code in the worker can write to any descriptor."""
    try:
        answer = json.loads(sent.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text(worker: _Worker) -> str:
    # What stands in the pipe after the answer is of the same worker; it is short, since the worker has ended.
    stream: IO[bytes] | None = worker.process.stderr
    if stream is not None and stream.fileno() in worker.open_streams:
        os.set_blocking(stream.fileno(), False)
        worker.output += stream.read() or b""
    return worker.output[-_OUTPUT_TAIL_BYTES:].decode(errors="replace")
