"""core/engine/replicas/process.py: a real server in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from core.engine.replicas.process import ServerProcess

pytestmark = pytest.mark.slow
SERVE = ("serve", "--device", "cpu", "--mode", "off", "--host", "127.0.0.1", "--port", "0")


def status(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return int(answer.status)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def test_it_serves_and_ends_when_asked(tmp_path: Path) -> None:
    ended = threading.Event()
    server = ServerProcess(SERVE, {}, tmp_path, ended.set)
    assert status(server.url()) == 200
    server.stop(5.0)
    assert not ended.wait(0.5)


def test_a_server_that_dies_is_told(tmp_path: Path) -> None:
    ended = threading.Event()
    server = ServerProcess(SERVE, {}, tmp_path, ended.set)
    server.url()
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    assert ended.wait(10.0)


def test_what_a_server_says_may_be_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "server"
    line = '{"event": "serving", "url": "http://h"}'
    program.write_text(f"#!/bin/sh\nprintf 'odd \\377 byte\\n%s\\n' '{line}' >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    ended = threading.Event()
    assert ServerProcess((), {}, tmp_path, ended.set).url() == "http://h"
    assert ended.wait(10.0)


def test_signals_that_its_starter_holds_back_end_it(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        server = ServerProcess(SERVE, {}, tmp_path, lambda: None)
        server.url()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    start = time.monotonic()
    server.stop(60.0)
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("folder", ["", "missing"])
def test_one_that_never_serves_says_why(folder: str, tmp_path: Path) -> None:
    server = ServerProcess(("serve", "--device", "none"), {}, tmp_path / folder, lambda: None)
    with pytest.raises(RuntimeError, match="could not be started" if folder else "no installed plugin has that name"):
        server.url()


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from core.engine.replicas.process import ServerProcess\n"
        f"server = ServerProcess({SERVE!r}, {{}}, Path({str(tmp_path)!r}), lambda: None)\n"
        "print(server.url(), server._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    with parent.stdout as lines:
        server = int(lines.readline().split()[1])
        own = [server, *children(server)]
        parent.kill()
        parent.wait()
    until = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in own):
        assert time.monotonic() < until, f"of {own} some are left"
        time.sleep(0.1)
