"""One worker process: how it is started, read and ended. What it is asked is for core/host/workers/pool.py."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, Any

_OUTPUT_TAIL_BYTES = 16_384
_CHUNK_BYTES = 65_536
# A process that prints without end must not keep its reader: what comes after these chunks is read the next time.
_MAX_CHUNKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """What became of one worker, or of one request to it.

    answer: the JSON object it sent, or None. problem: why there is none, as a verb phrase. timed_out: it was killed at
    its deadline. output: the tail of what it printed meanwhile, both streams.
    """

    answer: dict[str, Any] | None
    problem: str = ""
    timed_out: bool = False
    output: str = ""


class WorkerProcess:
    """`python -m module argument` in a process group of its own, read through a selector that may serve others too.

    requests: whether it has a standard input to send to. received: what came over its channel. Registered events carry
    this object as their data: pass each ready one to `handle`.
    """

    def __init__(self, module: str, argument: str, selector: selectors.BaseSelector, *, requests: bool = False) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", module, argument],
            stdin=subprocess.PIPE if requests else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
            start_new_session=True,  # one group to kill, with everything that the worker started
        )
        self._selector = selector
        self._to_send = b""
        self._output = b""
        self.received = b""
        self._open: set[int] = set()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._register(stream, selectors.EVENT_READ)

    @property
    def silent(self) -> bool:
        """Whether nothing more can come: every process that held the streams has closed them."""
        return not self._open

    @property
    def output(self) -> str:
        """The tail of what it printed since `forget_output`."""
        return self._output.decode(errors="replace")

    def forget_output(self) -> None:
        """Begin a new tail."""
        self._output = b""

    def handle(self, key: selectors.SelectorKey) -> None:
        """Read from, or write to, the stream that the selector found ready."""
        if key.fileobj is self._popen.stdin:
            self._write()
        else:
            self._read(key.fd)

    def send(self, line: bytes) -> None:
        """Queue a line for its standard input; it is written as the process reads, by `handle`."""
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        if not self._to_send:
            self._selector.register(self._popen.stdin, selectors.EVENT_WRITE, self)
        self._to_send += line

    def drain(self) -> None:
        """Read what has arrived, without waiting."""
        for _ in range(_MAX_CHUNKS):
            arrived = [self._read(descriptor) for descriptor in tuple(self._open)]
            if not any(arrived):
                return

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, None if it still runs after `timeout_s`; a negative one is a signal's number."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=max(0.0, timeout_s))
        return self._popen.returncode

    def kill(self) -> None:
        """Kill it with all its group and reap it; may be called again, and from any thread."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def close(self) -> None:
        """Kill it, read what it left in the pipes, and give up the streams; again does nothing."""
        assert self._popen.stdout is not None
        if self._popen.stdout.closed:
            return
        self.kill()
        self.drain()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if stream is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(stream)
                stream.close()
        self._open.clear()
        self._to_send = b""

    def _register(self, stream: IO[bytes], events: int) -> None:
        self._selector.register(stream, events, self)
        self._open.add(stream.fileno())

    def _read(self, descriptor: int) -> bool:
        """Read once; return whether something came."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        assert self._popen.stdout is not None
        if not chunk:
            self._selector.unregister(descriptor)
            self._open.discard(descriptor)
        elif descriptor == self._popen.stdout.fileno():
            self.received += chunk
        else:
            self._output = (self._output + chunk)[-_OUTPUT_TAIL_BYTES:]
        return bool(chunk)

    def _write(self) -> None:
        assert self._popen.stdin is not None
        try:
            self._to_send = self._to_send[os.write(self._popen.stdin.fileno(), self._to_send) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It has ended, or is about to: that shows elsewhere, with its cause.
            self._to_send = b""
        if not self._to_send:
            self._selector.unregister(self._popen.stdin)


def _environment() -> dict[str, str]:
    """Return the environment in which a worker finds the same modules as this process, and nothing of the folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def parsed(sent: bytes) -> dict[str, Any] | None:
    """Return the JSON object in the first line, or None: foreign code in the worker can write to any descriptor."""
    try:
        answer = json.loads(sent.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def ending(code: int) -> str:
    """Say how a process ended, as a verb phrase; a negative exit code is a signal's number."""
    return f"crashed with {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def unanswered(code: int | None, timeout_s: float) -> str:
    """Say why there is no answer, as a verb phrase; no exit code: the process was killed at its deadline."""
    if code is None:
        return f"gave no answer within {timeout_s:g} s and was killed"
    return ending(code) if code < 0 else f"{ending(code)} and no answer"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
