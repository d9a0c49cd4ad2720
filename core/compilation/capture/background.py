"""Buckets that are compiled while the program runs: each by a quicker lowering until its own is there."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from core.common.under_way import UnderWay
from core.errors import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import BoundCallable, GraphKey
    from core.common.under_way import Steps

log = logging.getLogger("core.compilation.program")
_POLL_S = 0.02
MAX_AT_ONCE = min(os.cpu_count() or 1, 4)
"""Buckets whose compilers run at the same time at most; one takes up to 1 GiB of memory."""


class _BriefTurns:
    """Threads take turns of Python's lock ten times as often, for as long as any is in the block.

    A step asks for the lock at each of its ops, and what begins a compile at each file that it reads: either would wait
    for the other's turn of 5 ms as often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(self._before / 10)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


_BRIEF_TURNS = _BriefTurns()


class Bucket:
    """Runs a bucket: what is compiled, once that is there, and what stands in until then."""

    def __init__(self, key: GraphKey, begin: Callable[[], Steps[BoundCallable]], interim: BoundCallable) -> None:
        """begin: begins to compile."""
        self.key = key
        self.num_interim = 0
        self.failure = ""
        self._begin = begin
        self._interim = interim
        self._work: UnderWay[BoundCallable] | None = None
        self._own: BoundCallable | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """Run on the present content of the inputs."""
        own = self._own
        if own is not None:
            return own()
        self.num_interim += 1
        return self._interim()

    @property
    def is_begun(self) -> bool:
        """Whether a compiler works, has worked, or has failed."""
        return self._work is not None or bool(self.failure)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to do."""
        return self._own is not None or bool(self.failure)

    def begin(self) -> BoundCallable | None:
        """Begin, and return what was compiled, if it was there; raises what goes wrong."""
        self._work = UnderWay(self._begin())
        return self._work.finish() if self._work.is_done else None

    def advance(self) -> bool:
        """Begin or go on, without waiting; return whether anything was done."""
        try:
            moved = self._work is not None and self._work.advance()
            if self._work is None:
                self.begin()
                moved = True
            if self._work is not None and self._work.is_done:
                self._own = self._work.finish()
            return moved
        except Exception as error:  # any part of a compiler may raise, and steps go on as they are
            self.failure = f"{type(error).__name__}: {one_line(str(error))}"
            return True

    def abandon(self) -> None:
        """End its compiler."""
        if self._work is not None:
            self._work.abandon()


class Background:
    """Compiles the buckets of one program in a thread: those that ran most first, a few at a time."""

    def __init__(self, interim: str) -> None:
        """interim: the name of the quicker lowering."""
        self._interim = interim
        self._buckets: list[Bucket] = []
        #: seconds from the end of the start until all was compiled
        self.elapsed_s = 0.0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, key: GraphKey, begin: Callable[[], Steps[BoundCallable]], interim: BoundCallable) -> BoundCallable:
        """Return what runs a bucket: what is compiled where that lies in the compile cache, else interim until it is
        compiled. Raises what goes wrong at the beginning, up to the first bucket that is not there."""
        bucket = Bucket(key, begin, interim)
        if (
            not self._buckets
        ):  # after a bucket that must be compiled, the others are not looked for: that takes time too
            own = bucket.begin()
            if own is not None:
                return own
        self._buckets.append(bucket)
        return bucket

    def start(self) -> None:
        """Begin to compile, once all buckets are added."""
        if self._buckets:
            atexit.register(self.end)
            self._thread = threading.Thread(target=self._run, name="core-compile", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all is compiled, or has failed; return whether it is."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return all(bucket.is_over for bucket in self._buckets)

    def end(self) -> None:
        """End all compilers and forget the buckets; others may be added afterwards."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
            self._ending.clear()
            self._thread = None
            atexit.unregister(self.end)
        for bucket in self._buckets:
            bucket.abandon()
        self._buckets.clear()

    def interim_runs(self) -> dict[GraphKey, int]:
        """Return how often each bucket ran that was not compiled yet."""
        return {bucket.key: bucket.num_interim for bucket in self._buckets if bucket.num_interim}

    @property
    def pending(self) -> tuple[GraphKey, ...]:
        """The buckets that are not compiled yet."""
        return tuple(bucket.key for bucket in self._buckets if not bucket.is_over)

    @property
    def num_compiled(self) -> int:
        """How many buckets were compiled."""
        return sum(bucket.is_over and not bucket.failure for bucket in self._buckets)

    @property
    def notes(self) -> tuple[str, ...]:
        """What failed, for the report."""
        return tuple(map(self._note, (bucket for bucket in self._buckets if bucket.failure)))

    def _note(self, bucket: Bucket) -> str:
        return f"{bucket.key} goes on by lowering {self._interim!r}, as it can't be compiled: {bucket.failure}"

    def _run(self) -> None:
        with _BRIEF_TURNS:
            self._compile()

    def _compile(self) -> None:
        start = time.perf_counter()
        left = list(self._buckets)
        while left and not self._ending.is_set():
            under_way = [bucket for bucket in left if bucket.is_begun]
            waiting = [bucket for bucket in left if not bucket.is_begun]
            if waiting and len(under_way) < MAX_AT_ONCE:
                under_way.append(max(waiting, key=lambda bucket: bucket.num_interim))
            moved = [bucket.advance() for bucket in under_way]
            for bucket in under_way:
                if bucket.failure:
                    log.warning("%s", self._note(bucket))
            left = [bucket for bucket in left if not bucket.is_over]
            if not any(moved):
                self._ending.wait(_POLL_S)
        self.elapsed_s = time.perf_counter() - start
        if not left:
            log.info("compiled %d buckets in %.1f s, beside the steps", self.num_compiled, self.elapsed_s)
