"""A server in a child process: `core serve` on a port of its own, as a replica runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

_KILL_S = 5.0
"""How long a server may take to end after the time that it drains, before it is killed."""
_LAST_LINES = 20


class ServerProcess:
    """`python -m core` with these arguments; its log goes to this process's standard error.

    The server ends with this process, however that ends.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, ended: Callable[[], None]
    ) -> None:
        """Start it.

        environment: added to this process's own. folder: where it runs. ended: called by a thread of this object when
        the server has ended once it had served, and `stop` had not been called.
        """
        self._command = [sys.executable, "-m", "core.cli.child", str(os.getpid()), *arguments]
        self._environment, self._folder = {**os.environ, **environment}, folder
        self._process: subprocess.Popen[str] | None = None
        self._url: Future[str] = Future()
        self._ended, self._stopping = ended, False
        # The kernel ends a child with the thread that started it, so that thread stays as long as the child.
        threading.Thread(target=self._run, name="core-server", daemon=True).start()

    def url(self) -> str:
        """Wait until it serves, and return where; raise `RuntimeError` with its last lines where it ended instead."""
        return self._url.result()

    def stop(self, drain_timeout_s: float) -> None:
        """Have it finish what runs, for so long at most, and end it."""
        process, self._stopping = self._process, True
        if process is None:
            return
        process.terminate()
        try:
            process.wait(drain_timeout_s + _KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self) -> None:
        last, why = [], "core serve was not watched to its end"  # type: list[str], str
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            assert self._process.stderr is not None
            with self._process.stderr as lines:
                for line in lines:
                    sys.stderr.write(line)
                    last = [*last[1 - _LAST_LINES :], line]
                    if not self._url.done() and (url := _served(line)):
                        self._url.set_result(url)
            code = self._process.wait()
            why = f"core serve ended with exit code {code}:\n{''.join(last)}"
        except OSError as error:
            why = f"core serve could not be started in {self._folder}: {error}"
        finally:
            if not self._url.done():
                self._url.set_exception(RuntimeError(why))
            elif not self._stopping:
                self._ended()


def _served(line: str) -> str | None:
    """Return the address in a line of the log that says that the server serves."""
    with suppress(ValueError):
        told = json.loads(line)
        if isinstance(told, dict) and told.get("event") == "serving":
            return str(told["url"])
    return None
