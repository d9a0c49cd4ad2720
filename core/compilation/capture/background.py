"""Buckets that are compiled while the program runs: each by a quicker lowering until its own is there."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from core.common.kernel_compilers import counting_kernels
from core.common.under_way import UnderWay
from core.errors import CoreError, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import BoundCallable, GraphKey
    from core.common.kernel_compilers import Count, KernelCompiler
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

    def __init__(self, key: GraphKey, begin: Callable[[], Steps[BoundCallable]]) -> None:
        """begin: begins to compile."""
        self.key = key
        self.num_interim = 0
        self.failure = ""
        self._begin: Callable[[], Steps[BoundCallable]] | None = begin
        self._work: UnderWay[BoundCallable] | None = None
        #: what runs, and whether it stands in: together, as they change while another thread calls
        self._run: tuple[BoundCallable, bool] | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """Run on the present content of the inputs."""
        assert self._run is not None, "it has a stand-in before it is called"
        run, stands_in = self._run
        if stands_in:
            self.num_interim += 1
        return run()

    @property
    def is_begun(self) -> bool:
        """Whether a compiler works, has worked, or has failed."""
        return self._begin is None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to do."""
        return self.is_begun and self._work is None

    def begin(self) -> BoundCallable | None:
        """Begin, and return what was compiled, if it was there. Raises `CoreError`; what else goes wrong is its
        `failure`."""
        assert self._begin is not None, "it begins once"
        begin, self._begin = self._begin, None
        try:
            work = UnderWay(begin())
            if work.is_done:
                return work.finish()
            self._work = work
        except CoreError:
            raise
        except Exception as error:  # any part of a compiler may raise, and steps go on as they are
            self._fail(error)
        return None

    def stand_in(self, interim: BoundCallable) -> None:
        """Run this until it is compiled."""
        self._run = interim, True

    def advance(self) -> bool:
        """Begin or go on, without waiting; return whether anything was done."""
        try:
            if not self.is_begun:
                own = self.begin()
                if own is not None:
                    self._run = own, False
                return True
            moved = self._work is not None and self._work.advance()
            if self._work is not None and self._work.is_done:
                self._run = self._work.finish(), False  # and let go of what stood in
                self._work = None
            return moved
        except Exception as error:
            self._fail(error)
            return True

    def abandon(self) -> None:
        """End its compiler."""
        if self._work is not None:
            self._work.abandon()

    def _fail(self, error: Exception) -> None:
        self._work = None
        self.failure = f"{type(error).__name__}: {one_line(str(error))}"


class Background:
    """Compiles the buckets of one program in a thread: those that ran most first, a few at a time."""

    def __init__(self, interim: str, compilers: Sequence[KernelCompiler] = ()) -> None:
        """interim: the name of the quicker lowering. compilers: those whose kernels are counted."""
        self._interim = interim
        self._compilers = compilers
        self._buckets: list[Bucket] = []
        self._notes: list[str] = []
        #: seconds from the end of the start until all was compiled
        self.elapsed_s = 0.0
        self._count: Count = int
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def add(
        self, key: GraphKey, begin: Callable[[], Steps[BoundCallable]], interim: Callable[[], BoundCallable]
    ) -> BoundCallable:
        """Return what runs a bucket: what is compiled where that lies in the compile cache, else what interim makes,
        until it is compiled. Raises `CoreError` of the beginning, up to the first bucket that is not there."""
        bucket = Bucket(key, begin)
        if not self._buckets:  # the others are not looked for once one must be compiled: that takes time too
            own = bucket.begin()
            if own is not None:
                return own
            if bucket.failure:
                log.warning("%s", self._note(bucket))
        self._buckets.append(bucket)
        bucket.stand_in(interim())
        return bucket

    def note(self, note: str) -> None:
        """Log and keep, once each, a note of a lowering for the report: that of the start is made before."""
        if note not in self._notes:
            log.warning(note)
            self._notes.append(note)

    def start(self) -> None:
        """Begin to compile, once all buckets are added."""
        if self.pending:
            atexit.register(self.end)
            self._thread = threading.Thread(target=self._run, name="core-compile", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all is compiled, or has failed; return whether it is."""
        thread = self._thread  # another thread may end it meanwhile
        if thread is not None:
            thread.join(timeout_s)
        return not self.pending

    def end(self) -> None:
        """End all compilers and forget the buckets; others may be added afterwards."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
            self._ending.clear()
            self._thread = None
        for bucket in self._buckets:
            bucket.abandon()
        self._buckets.clear()
        self._notes.clear()

    def interim_runs(self) -> dict[GraphKey, int]:
        """Return how often each bucket ran that was not compiled yet."""
        return {bucket.key: bucket.num_interim for bucket in self._buckets if bucket.num_interim}

    @property
    def pending(self) -> tuple[GraphKey, ...]:
        """The buckets that are not compiled yet."""
        return tuple(bucket.key for bucket in self._buckets if not bucket.is_over)

    @property
    def num_kernels(self) -> int:
        """How many kernels were compiled."""
        return self._count()

    @property
    def notes(self) -> tuple[str, ...]:
        """What failed, and what was lowered otherwise than asked, for the report."""
        return (*self._notes, *map(self._note, (bucket for bucket in self._buckets if bucket.failure)))

    def _note(self, bucket: Bucket) -> str:
        return f"{bucket.key} goes on by lowering {self._interim!r}, as it can't be compiled: {bucket.failure}"

    def _run(self) -> None:
        try:
            with _BRIEF_TURNS, counting_kernels(self._compilers) as count:
                self._count = count
                try:
                    self._compile()
                finally:
                    self._count = partial(int, count())
        finally:
            atexit.unregister(self.end)  # which keeps the program, as this thread does no more

    def _compile(self) -> None:
        start = time.perf_counter()
        left = [bucket for bucket in self._buckets if not bucket.is_over]
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
            log.info("compiled %d buckets in %.1f s, beside the steps", len(self._buckets), self.elapsed_s)
