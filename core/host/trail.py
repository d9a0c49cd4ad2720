"""Records which part of a plugin runs, in memory that outlives the process: a hook may end its process silently.

`core.cli.supervision` reads it after the process has ended. Nothing is kept unless somebody watches.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from core.device import PluginInfo

_SIZE_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A plugin and its running part; `what` is "" after the part has returned."""

    plugin: PluginInfo
    what: str


class Trail:
    """Memory that a process shares with the one that it is forked from."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        self._writer = 0

    def follow(self) -> None:
        """Record plugin calls in this process from now on; forked processes record nothing."""
        global _followed
        self._writer = os.getpid()
        _followed = self

    def finish(self) -> None:
        """Note that the process has come to the end of its work."""
        self._write({**self._read(), "finished": True})

    def enter(self, running: Running) -> None:
        """Record the running part."""
        self._write({"plugin": asdict(running.plugin), "what": running.what})

    @property
    def finished(self) -> bool:
        """Whether the process came to the end of its work."""
        return bool(self._read().get("finished"))

    @property
    def running(self) -> Running | None:
        """The plugin part that ran last; None if none was called, or its name is too long."""
        found = self._read()
        return Running(plugin=PluginInfo(**found["plugin"]), what=found["what"]) if "plugin" in found else None

    def _write(self, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        if os.getpid() == self._writer and len(data) <= _SIZE_BYTES:
            self._memory[:] = data.ljust(_SIZE_BYTES, b"\0")

    def _read(self) -> dict[str, Any]:
        data = self._memory[:].rstrip(b"\0")
        found: dict[str, Any] = json.loads(data) if data else {}
        return found


_followed: Trail | None = None


@contextmanager
def running(plugin: PluginInfo, what: str) -> Iterator[None]:
    """Record in the active trail that `what` of the plugin runs, and afterwards that it has returned."""
    if _followed is None:
        yield
        return
    _followed.enter(Running(plugin=plugin, what=what))
    try:
        yield
    finally:
        _followed.enter(Running(plugin=plugin, what=""))
