"""Asking worker processes, each request with a deadline: a vendor's crash or hang stays outside this process.

A worker is a module with `answer(request)`, which takes and returns a JSON object. `PersistentWorker` asks one many
times; `Asked` asks several once, all at the same time.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from core.host.workers.process import WorkerProcess, ending, parsed, unanswered

_NO_ANSWER = "sent something else than an answer"
_STOPPED = "was stopped"
# How soon the end of a process is seen that has left its streams open with a child.
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """The result of one request to a worker."""

    #: The JSON object that the worker sent; None where there is no answer.
    answer: dict[str, Any] | None = None
    #: Why there is no answer, as a verb phrase.
    problem: str = ""
    #: Whether the worker was killed at its deadline.
    timed_out: bool = False
    #: The tail of what the worker printed meanwhile, on both streams.
    output: str = ""


class PersistentWorker:
    """One worker that answers request after request; it is started on the first one, and again after it was lost.

    A crash, a missed deadline or anything but an answer on the channel ends the process with all it has started, and
    the result says so. One thread at a time may ask; any thread may `close`, which ends a request under way.
    """

    def __init__(
        self, module: str, given: Mapping[str, Any] | None = None, *, python: str = "", **environment: str
    ) -> None:
        """given: what every request holds beside its own entries. environment: variables that the process has too.

        python: the Python of another environment, which has `core` too; "" for this process's own.
        """
        self._python = python
        self._module, self._given, self._environment = module, dict(given or {}), environment
        self._process: WorkerProcess | None = None
        self._busy = threading.Lock()
        # Makes "not closed, so start" atomic: a process started during `close` would outlive it.
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

    def request(self, payload: Mapping[str, Any] | None = None, *, timeout_s: float) -> WorkerResult:
        """Send a JSON object and wait for the answer; timeout_s counts from here, the process's start included."""
        deadline = time.monotonic() + timeout_s
        self.lost()
        with self._busy:
            process = self._started()
            if process is None:
                return WorkerResult(problem=_STOPPED)
            token = secrets.token_hex(8)
            process.forget_output()
            process.send(json.dumps({"request": token, "payload": {**self._given, **(payload or {})}}))
            code = _answered(process, deadline)
            process.drain()
            sent, answer, problem = process.has_sent, _taken(process, token), ""
            if answer is None:
                self._end()
                problem = _NO_ANSWER if sent else _STOPPED if self._closed else unanswered(code, timeout_s)
            timed_out = not sent and code is None
            return WorkerResult(answer=answer, problem=problem, timed_out=timed_out, output=process.output)

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
        self.kill()

    def _started(self) -> WorkerProcess | None:
        with self._starting:
            if self._process is None and not self._closed:
                self._process = WorkerProcess(self._module, self._environment, self._python)
            return None if self._closed else self._process

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


class Asked(ExitStack):
    """Asks workers once each, all at the same time; leaving the context kills those that still run."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[str, Future[WorkerResult]] = {}

    def ask(self, key: str, module: str, *, timeout_s: float, **payload: object) -> None:
        """Start a worker and send it this request; its result will be found under `key`."""
        # Entered last, so exited first: the request must be ended before anyone waits for the thread.
        thread = self.enter_context(ThreadPoolExecutor(1))
        worker = self.enter_context(PersistentWorker(module))
        self._results[key] = thread.submit(worker.request, payload, timeout_s=timeout_s)

    def results(self) -> dict[str, WorkerResult]:
        """Wait for every worker's answer, end or deadline, and return the results by key."""
        return {key: result.result() for key, result in self._results.items()}


def ask_once(module: str, payload: Mapping[str, Any], *, timeout_s: float, **environment: str) -> WorkerResult:
    """Ask a worker once and end it. environment: variables that it has besides this process's."""
    with PersistentWorker(module, None, **environment) as worker:
        return worker.request(payload, timeout_s=timeout_s)


def _answered(process: WorkerProcess, deadline: float) -> int | None:
    """Read until a line has come, the process has ended or time is up; return the exit code of one that has ended."""
    while not process.has_sent:
        remaining, code = deadline - time.monotonic(), process.wait(0)
        if code is not None or remaining <= 0:
            return code
        process.serve(min(remaining, _POLL_S))
    return None


def _taken(process: WorkerProcess, token: str) -> dict[str, Any] | None:
    """Take the answer to the request of that token; None for anything else, also for an answer with more behind it."""
    line, _, rest = process.received.partition(b"\n")
    process.received = b""
    received = None if rest else parsed(line)
    answer = received.get("answer") if received and received.get("request") == token else None
    return answer if isinstance(answer, dict) else None
