"""Finds out whether torch_npu's task queue of a device has ended: from then on ops silently do nothing.

With TASK_QUEUE_ENABLE=1 (its default) torch_npu launches kernels from a thread of its own. After one failed launch that
thread ends. The failure is raised once, at whatever op or wait comes next; every later op returns, and its result is
what the memory held before.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.errors import DeviceUnavailableError

__all__ = ["TaskQueue", "task_queue"]

_TOLD = re.compile(r"process exits for this inner error|Task queue thread is exit", re.IGNORECASE)
"""Errors of torch_npu for a failed launch in its queue, and for a queue that has ended."""

_FIRST = 0x5EED_0000
"""First test value: one that memory hardly holds by chance."""


class TaskQueue:
    """The queue of one device."""

    def __init__(self, device: torch.device) -> None:
        #: Whether it was seen that ops do nothing any more; that stays so for the whole process.
        self.ended = False
        self._device = device
        self._value = _FIRST
        self._kept: torch.Tensor | None = None
        self._lock = threading.Lock()

    def require(self, asked: str, cause: BaseException | None = None) -> None:
        """Raise `DeviceUnavailableError` where the queue is known to have ended."""
        if self.ended:
            raise DeviceUnavailableError(
                asked,
                found="torch_npu's task queue has ended after a failed launch: ops return and do nothing"
                + (f"; it said: {' '.join(str(cause).split())[:200]}" if cause else ""),
                remedy="restart the process; with TASK_QUEUE_ENABLE=0 the launch that fails raises its own error",
            ) from cause

    def check(self, asked: str, cause: RuntimeError | None = None) -> None:
        """Find out whether ops still do something; raise `DeviceUnavailableError` where they don't.

        Waits for the device's default stream. cause: an error of the runtime, which may tell as much.
        """
        if not self.ended and cause is not None and _TOLD.search(str(cause)):
            self.ended = True
        # Without a queue a failed launch raises at its place, and those after it run.
        if not self.ended and os.environ.get("TASK_QUEUE_ENABLE") != "0":
            with self._lock:
                self.ended = self._does_nothing()
        self.require(asked, cause)

    @contextmanager
    def watched(self, asked: str) -> Iterator[None]:
        """Refuse the block if the queue has ended, and check the queue after each error of the runtime."""
        self.require(asked)
        try:
            yield
        except RuntimeError as error:
            self.check(asked, error)
            raise

    def _does_nothing(self) -> bool:
        """Write a new value into a tensor and read it back.

        On the default stream, which is never captured. A failing read proves nothing: its error may be left over from
        before, or belong to a capture that could not be ended.
        """
        npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu registers it
        for _ in range(2):
            try:
                # A tensor made in inference mode could not be written outside of it.
                with (
                    torch.inference_mode(False),
                    torch.no_grad(),
                    npu.device(self._device),
                    npu.stream(npu.default_stream(self._device)),
                ):
                    if self._kept is None:
                        self._kept = torch.zeros(1, dtype=torch.int64, device=self._device)
                    self._value += 1
                    return bool(self._kept.fill_(self._value).item() != self._value)
            except RuntimeError as error:
                if _TOLD.search(str(error)):
                    return True
        return False


@functools.cache
def task_queue(device: torch.device) -> TaskQueue:
    """Return the queue of a device, one for the process."""
    return TaskQueue(device)
