"""The worker's side of core/workers.py: one JSON line on a channel that nothing else can write to."""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import sys
from collections.abc import Callable


def serve(answer: Callable[[str], dict[str, object]]) -> None:
    """Call `answer` with this process's argument and send what it returns to the parent, then exit at once."""
    # What the worker's code prints, from Python or from a C library, must not mix with the answer: the real standard
    # output is kept aside, and descriptor 1 becomes standard error.
    channel = _high_duplicate(1)
    os.dup2(2, 1)
    faulthandler.enable()
    process = os.getpid()
    line = json.dumps(answer(sys.argv[1])) + "\n"
    if os.getpid() != process:
        # A vendor's code forked and came back twice: only the process that was asked may answer.
        os._exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(channel, "w") as stream:
        stream.write(line)
    # A driver that hangs or crashes while the interpreter shuts down has no say in the answer any more.
    os._exit(0)


def _high_duplicate(descriptor: int) -> int:
    """Duplicate to a number that no code writes to by habit, as it does to 3, and that no started program inherits."""
    for least in (900, 200):
        try:
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
        except OSError:  # above the limit on open files
            continue
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def import_attribute(reference: str) -> object:
    """Return what `module:attribute` names (an entry point's value, its extras ignored)."""
    from importlib import import_module

    module, _, attribute = reference.partition("[")[0].strip().partition(":")
    value: object = import_module(module.strip())
    for name in filter(None, attribute.strip().split(".")):
        value = getattr(value, name)
    return value
