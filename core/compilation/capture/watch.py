"""Watches replays: addresses that graphs hold must not change, and nothing should be compiled."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from core.common.graphs.backend import GraphKey
from core.errors import CaptureError

__all__ = ["CompileWatch", "Watched", "watch_modules"]

log = logging.getLogger("core.graphs")
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Watched:
    """A tensor whose address a captured graph holds."""

    name: str
    #: Returns the owner's present tensor.
    current: Callable[[], Tensor | None]
    #: The address at capture.
    address: int

    def check(self, key: GraphKey) -> None:
        """Raise `CaptureError` if the tensor is elsewhere now: the graph would go on reading the old memory."""
        tensor = self.current()
        address = None if tensor is None else tensor.data_ptr()
        if address != self.address:
            where = "is gone" if address is None else f"lies at {address:#x}"
            raise CaptureError(
                f"replaying {key}",
                found=f"{self.name} {where}, and lay at {self.address:#x} when the graph was captured",
                remedy="write into it in place (tensor.copy_(new)), or compile again after replacing it",
            )


def watch_modules(modules: dict[str, nn.Module]) -> tuple[Watched, ...]:
    """Watch the parameters and buffers of these modules, each by its path."""
    found = []
    for path, module in modules.items():
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None:
                label = f"{path}.{name}".lstrip(".")
                found.append(Watched(label, partial(getattr, module, name, None), tensor.data_ptr()))  # None: deleted
    return tuple(found)


class CompileWatch:
    """Counts what torch compiles while a program serves, by name; in strict mode a compile is an error.

    Only compiles of the serving thread count: another thread may well prepare another program.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._watched: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.pending = ""

    def watching(self) -> AbstractContextManager[None]:
        """Watch inside the block; of a block within another, only the outer one counts."""
        thread = threading.get_ident()
        return _NOTHING if thread in self._watched else _Watching(self._watched, thread, self._hear)

    def raise_pending(self) -> None:
        """Raise `CaptureError` for a compile since the last call, where strict."""
        name, self.pending = self.pending, ""
        if name:
            raise CaptureError(
                "serving without compiles",
                found=f"torch compiled {name}",
                remedy="warm up with every shape that is served, or serve without strict",
            )

    def _hear(self, event: Any) -> None:
        name = _compiled_function() or f"frame {event.compile_id}"
        log.warning("torch compiled %s while serving: the step waited for it", name)
        self.counts[name] += 1
        if self._strict:  # torch would wrap an error raised here in its own
            self.pending = name


class _Watching:
    """Hears of the compiles of one thread. A class, since each step of an engine enters it."""

    __slots__ = ("_callbacks", "_hear", "_thread", "_watched")

    def __init__(self, watched: set[int], thread: int, hear: Callable[[Any], None]) -> None:
        from torch._dynamo.callback import callback_handler

        self._watched, self._thread, self._hear, self._callbacks = watched, thread, hear, callback_handler

    def __enter__(self) -> None:
        self._callbacks.register_start_callback(self._called)
        self._watched.add(self._thread)

    def __exit__(self, *_: object) -> None:
        self._watched.discard(self._thread)
        with suppress(ValueError):  # torch._dynamo.reset() has removed it with all others
            self._callbacks.remove_start_callback(self._called)

    def _called(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            self._hear(event)


def _compiled_function() -> str:
    """Return name and place of the function being compiled, from torch's frame that compiles it; "" if not found."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_locals.get("code")
        if isinstance(code, CodeType) and "_dynamo" in frame.f_code.co_filename:
            return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        frame = frame.f_back
    return ""
