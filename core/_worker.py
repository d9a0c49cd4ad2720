"""The worker's side of core/workers.py: one JSON line on a channel that nothing else can write to."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable


def serve(answer: Callable[[str], dict[str, object]]) -> None:
    """Call `answer` with this process's argument and send what it returns to the parent, then exit at once."""
    # What the worker's code prints, from Python or from a C library, must not mix with the answer: the real standard
    # output is kept aside, and descriptor 1 becomes standard error.
    channel = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()
    line = json.dumps(answer(sys.argv[1])) + "\n"
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(channel, "w") as stream:
        stream.write(line)
    # A driver that hangs or crashes while the interpreter shuts down has no say in the answer any more.
    os._exit(0)


def import_attribute(reference: str) -> object:
    """Return what `module:attribute` names (an entry point's value, its extras ignored)."""
    from importlib import import_module

    module, _, attribute = reference.partition("[")[0].strip().partition(":")
    value: object = import_module(module.strip())
    for name in filter(None, attribute.strip().split(".")):
        value = getattr(value, name)
    return value
