"""What of a plugin runs at this moment, kept where it outlives the process: a hook can end its process without a word.

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
    """A plugin, and what of it runs; `what` is "" for one that was called and has returned."""

    plugin: PluginInfo
    what: str


class Trail:
    """Memory that a process shares with the one that it is forked from."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        self._writer = 0

    def follow(self) -> None:
        """Keep from now on what plugins do in this process; processes that it forks keep nothing."""
        global _followed
        self._writer = os.getpid()
        _followed = self

    def finish(self) -> None:
        """Note that the process has come to the end of its work."""
        self._write({**self._read(), "finished": True})

    def enter(self, running: Running) -> None:
        """Note what runs."""
        self._write({"plugin": asdict(running.plugin), "what": running.what})

    @property
    def finished(self) -> bool:
        """Whether the process came to the end of its work."""
        return bool(self._read().get("finished"))

    @property
    def running(self) -> Running | None:
        """What of a plugin ran last; None where none was called, or its name is too long."""
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
    """Have the trail that is followed say that `what` of the plugin runs, and after it that it has returned."""
    if _followed is None:
        yield
        return
    _followed.enter(Running(plugin=plugin, what=what))
    try:
        yield
    finally:
        _followed.enter(Running(plugin=plugin, what=""))
