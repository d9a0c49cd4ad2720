"""The worker's side of core/host/workers/worker.py: JSON lines on a channel that nothing else can write to."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

_PARENT_POLL_S = 1.0


def serve(module: str) -> None:
    """Answer each request of the parent by the module's `answer`, one JSON object for another.

    The process exits when the parent has gone. An exception that `answer` lets out ends the process too.
    """
    channel = _protected_channel()
    # The worker's code may not read requests either, nor close the descriptor that they come from.
    requests = _high_duplicate(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    process = os.getpid()
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    answer: Callable[[Any], dict[str, object]] = import_module(module).answer
    with os.fdopen(requests, "rb") as asked, os.fdopen(channel, "w") as answers:
        for line in asked:
            request = json.loads(line)
            # The token of the request tells its answer from a line that other code of this process may send.
            reply = json.dumps({"request": request["request"], "answer": answer(request["payload"])})
            _leave_if_forked(process)
            answers.write(f"{reply}\n")
            answers.flush()
        # Exit at once: a driver that hangs or crashes in the interpreter's shutdown no longer matters.
        os._exit(0)


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, also in the middle of a case that hangs: nobody else would."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _protected_channel() -> int:
    """Keep the real standard output aside for answers, and return its new descriptor.

    What the worker's code prints, from Python or from a C library, must not mix with the answers: descriptor 1 becomes
    standard error.
    """
    channel = _high_duplicate(1)
    os.dup2(2, 1)
    faulthandler.enable()
    return channel


def _leave_if_forked(process: int) -> None:
    """Exit if a vendor's code forked and returned in both processes: only the original process may answer."""
    if os.getpid() != process:
        os._exit(0)
    # Flush before the answer, so that the parent assigns the output to the right request.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by something else
            stream.flush()


def _high_duplicate(descriptor: int) -> int:
    """Duplicate to a high number, since code writes to low ones such as 3 by habit; started programs do not inherit
    it."""
    for least in (900, 200):
        try:
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
        except OSError:  # above the limit on open files
            continue
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
