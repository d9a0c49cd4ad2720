"""Worker processes, each request with a deadline: a vendor's crash or hang stays outside this process."""

from __future__ import annotations

import json
import secrets
import selectors
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from core.host.workers.process import WorkerProcess, ending, parsed, unanswered
from core.host.workers.process import WorkerResult as WorkerResult  # what both kinds of worker give

_NO_ANSWER = "sent something else than an answer"
_MAX_ANSWER_BYTES = 64 * 2**20
# How soon the end of a process is seen that has left its streams open with a child.
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Worker:
    process: WorkerProcess
    deadline: float
    timeout_s: float

    @property
    def done(self) -> bool:
        return b"\n" in self.process.received or self.process.silent


class WorkerPool:
    """Launches workers of one answer each and collects them; leaving the context kills whatever still runs."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def launch(self, key: str, module: str, argument: str, *, timeout_s: float) -> None:
        """Start `python -m module argument`, whose answer will be found under `key`."""
        process = WorkerProcess(module, argument, self._selector)
        self._workers[key] = _Worker(process, time.monotonic() + timeout_s, timeout_s)

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
                    pending.discard(key)
            if pending:
                _serve(self._selector, min(self._workers[key].deadline for key in pending) - now)
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.process.close()
        self._selector.close()


def _serve(selector: selectors.BaseSelector, timeout_s: float) -> None:
    for key, _ in selector.select(max(timeout_s, 0.0)):
        process: WorkerProcess = key.data
        process.handle(key)


def _finish(worker: _Worker) -> WorkerResult:
    process = worker.process
    if b"\n" in process.received:
        process.close()
        answer = parsed(process.received)
        return WorkerResult(answer=answer, problem="" if answer is not None else _NO_ANSWER, output=process.output)
    code = process.wait(worker.deadline - time.monotonic())
    process.close()
    problem = unanswered(code, worker.timeout_s)
    return WorkerResult(answer=None, problem=problem, timed_out=code is None, output=process.output)


class PersistentWorker:
    """One worker that answers request after request, and is started on the first one and again after it was lost.

    The module calls `core.host.workers.channel.serve_requests`. A crash, a deadline missed or anything but an answer
    on the channel
    ends the process with all it has started, and is told in the result. One thread at a time may ask; any thread may
    `close`, which ends a request under way.
    """

    def __init__(self, module: str, argument: str) -> None:
        self._module, self._argument = module, argument
        self._selector = selectors.DefaultSelector()
        self._process: WorkerProcess | None = None
        self._busy = threading.Lock()
        # Guards the step from "not closed" to "started": a process that starts meanwhile would outlive `close`.
        self._starting = threading.Lock()
        self._closed = False

    def lost(self) -> str:
        """Say how a process that ran has ended by itself since its last answer; "" where it runs or none was started.

        Such a process is given up: the next request starts another.
        """
        with self._busy:
            if self._process is None:
                return ""
            self._process.drain()
            code = self._process.wait(0)
            if code is None and not self._process.received:
                return ""
            self._end()
            return _NO_ANSWER if code is None else ending(code)

    @property
    def running(self) -> bool:
        """Whether a process is there; `request` starts one otherwise."""
        return self._process is not None

    def request(self, payload: Mapping[str, Any], *, timeout_s: float) -> WorkerResult:
        """Send a JSON object and wait for the answer; timeout_s counts from here, the process's start included."""
        deadline = time.monotonic() + timeout_s
        self.lost()
        with self._busy:
            process = self._started()
            if process is None:
                return WorkerResult(answer=None, problem="was stopped")
            token = secrets.token_hex(8)
            process.forget_output()
            process.send(json.dumps({"request": token, "payload": payload}).encode() + b"\n")
            code = self._answered(process, deadline)
            process.drain()
            if b"\n" not in process.received and len(process.received) <= _MAX_ANSWER_BYTES:
                self._end()
                problem = "was stopped" if self._closed else unanswered(code, timeout_s)
                return WorkerResult(answer=None, problem=problem, timed_out=code is None, output=process.output)
            answer = _taken(process, token)
            if answer is None:
                self._end()
            return WorkerResult(answer=answer, problem="" if answer is not None else _NO_ANSWER, output=process.output)

    def _started(self) -> WorkerProcess | None:
        with self._starting:
            if self._process is None and not self._closed:
                self._process = WorkerProcess(self._module, self._argument, self._selector, requests=True)
            return None if self._closed else self._process

    def _answered(self, process: WorkerProcess, deadline: float) -> int | None:
        """Serve the process's streams until a line has come, it has ended or time is up; return its exit code."""
        while b"\n" not in process.received and len(process.received) <= _MAX_ANSWER_BYTES:
            left = deadline - time.monotonic()
            code = process.wait(0)
            if code is not None or left <= 0:
                return code
            _serve(self._selector, min(left, _POLL_S))
        return None

    def kill(self) -> None:
        """End the process; the next request starts another."""
        with self._busy:
            self._end()

    def close(self) -> None:
        """End the process for good: a request under way returns at once, later ones start nothing."""
        with self._starting:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
        with self._busy:
            self._end()
            self._selector.close()

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _taken(process: WorkerProcess, token: str) -> dict[str, Any] | None:
    """Take the answer to the request of that token; None for anything else, also for an answer with more behind it."""
    line, _, rest = process.received.partition(b"\n")
    process.received = b""
    received = None if rest else parsed(line)
    answer = received.get("answer") if received and received.get("request") == token else None
    return answer if isinstance(answer, dict) else None
