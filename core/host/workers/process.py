"""One worker process: how it is started, read and ended. core/host/workers/worker.py decides what it is asked."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from core.host.distributions.isolation import folders_set_aside

_OUTPUT_TAIL_BYTES = 16_384
_CHUNK_BYTES = 65_536
_MAX_ANSWER_BYTES = 64 * 2**20
# Chunks read at once: a process that prints without end must not block its reader.
_MAX_CHUNKS = 64


class WorkerProcess:
    """`python -m core.host.workers MODULE`, in a process group of its own."""

    def __init__(self, module: str, environment: Mapping[str, str], python: str = "") -> None:
        """python: another environment's, which finds its own packages; "" for this one's, with the same modules."""
        self._popen = subprocess.Popen(
            [python or sys.executable, "-P", "-m", "core.host.workers", module, *folders_set_aside()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**(os.environ if python else _environment()), **environment},
            start_new_session=True,  # one group to kill, with everything that the worker started
        )
        stdin, stdout, stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        os.set_blocking(stdin.fileno(), False)
        self._selector = selectors.DefaultSelector()
        for stream in (stdout, stderr):
            self._selector.register(stream, selectors.EVENT_READ)
        self._to_send = b""
        self._output = b""
        #: Data from the channel that was not taken yet.
        self.received = b""

    @property
    def has_sent(self) -> bool:
        """Whether a whole line has come over the channel, or more data than any answer has."""
        return b"\n" in self.received or len(self.received) > _MAX_ANSWER_BYTES

    @property
    def output(self) -> str:
        """The tail of what it printed since `forget_output`."""
        return self._output.decode(errors="replace")

    def forget_output(self) -> None:
        """Begin a new tail."""
        self._output = b""

    def send(self, line: str) -> None:
        """Queue a line for its standard input; `serve` writes it as the process reads."""
        if not self._to_send:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        self._to_send += f"{line}\n".encode()

    def serve(self, timeout_s: float) -> bool:
        """Read and write once what the streams allow, waiting for that at most so long; return whether one did."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj is self._stdin:
                self._write()
            else:
                self._read(key.fd)
        return bool(ready)

    def drain(self) -> None:
        """Read what has arrived, without waiting."""
        for _ in range(_MAX_CHUNKS):
            if not self.serve(0):
                return

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, None if it still runs after `timeout_s`; a negative one is a signal's number."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=timeout_s)
        return self._popen.returncode

    def kill(self) -> None:
        """Kill it with all its group and reap it; may be called again, and from any thread."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def close(self) -> None:
        """Kill it, read what it left in the pipes, and give up the streams."""
        self.kill()
        self.drain()
        self._selector.close()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()

    def _read(self, descriptor: int) -> None:
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(descriptor)
        elif descriptor == self._stdout.fileno():
            self.received += chunk
        else:
            self._output = (self._output + chunk)[-_OUTPUT_TAIL_BYTES:]

    def _write(self) -> None:
        try:
            self._to_send = self._to_send[os.write(self._stdin.fileno(), self._to_send) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The process has ended or is about to end; the reason is reported elsewhere.
            self._to_send = b""
        if not self._to_send:
            self._selector.unregister(self._stdin)


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
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in set(signal.Signals)
    return f"crashed with {signal.Signals(-code).name if known else f'signal {-code}'}"


def unanswered(code: int | None, timeout_s: float) -> str:
    """Say why there is no answer, as a verb phrase; no exit code: the process was killed at its deadline."""
    if code is None:
        return f"gave no answer within {timeout_s:g} s and was killed"
    return ending(code) if code < 0 else f"{ending(code)} and no answer"
