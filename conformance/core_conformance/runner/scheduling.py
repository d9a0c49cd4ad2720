"""Spreads cases over lanes: those that share work stay together, and an idle lane takes half of a busy one's."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from core_conformance.case import CaseInfo
from core_conformance.outcome import Outcome
from core_conformance.runner.lanes import Lane

Finished = Callable[[Outcome], None]
Waiting = Callable[[str, float], None]
"""Takes the id of the case that has run longest, and for how many seconds."""
WAIT_S = 1.0


class _Work:
    """The cases left, handed out to lanes by number."""

    def __init__(self, cases: Sequence[CaseInfo], num_lanes: int) -> None:
        self._waiting = deque(deque(block) for _, block in groupby(cases, key=lambda case: case.block))
        self._own: list[deque[CaseInfo]] = [deque() for _ in range(num_lanes)]
        self._lock = threading.Lock()

    def take(self, lane: int) -> CaseInfo | None:
        """Return the lane's next case: of its block, of a new block, or of another lane's; None where none is left."""
        with self._lock:
            if not self._own[lane]:
                self._own[lane] = self._waiting.popleft() if self._waiting else self._stolen()
            return self._own[lane].popleft() if self._own[lane] else None

    def _stolen(self) -> deque[CaseInfo]:
        """Take the back half of what the busiest lane has left; that lane goes on at the front."""
        longest = max(self._own, key=len)
        return deque(reversed([longest.pop() for _ in range((len(longest) + 1) // 2)]))


def run_all(
    lanes: Sequence[Lane], cases: Sequence[CaseInfo], finished: Finished, waiting: Waiting | None = None
) -> None:
    """Run cases on lanes, in a thread each, and call `finished` with each outcome, in the calling thread.

    waiting: called there too, after each `WAIT_S` seconds in which no case ended.
    Lanes but the first are closed when there is nothing left for them. What `finished` raises, or a KeyboardInterrupt,
    ends the run: all lanes are closed, and so are the processes behind them.
    """
    work = _Work(cases, len(lanes))
    done: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    under_way: dict[int, tuple[float, str]] = {}

    def serve(number: int) -> None:
        try:
            while not stop.is_set() and (case := work.take(number)) is not None:
                under_way[number] = time.monotonic(), case.id
                done.put(lanes[number].run(case))
                del under_way[number]
            if number:
                lanes[number].close()
            done.put(None)
        except BaseException as error:  # handed to the calling thread
            done.put(error)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(len(lanes))]
    for thread in threads:
        thread.start()
    try:
        for outcome in _until_done(done, len(threads)):
            if outcome is not None:
                finished(outcome)
            elif waiting is not None and (oldest := min(under_way.copy().values(), default=None)) is not None:
                waiting(oldest[1], time.monotonic() - oldest[0])
    except BaseException:
        stop.set()
        for lane in lanes:
            lane.close()
        raise
    finally:
        for thread in threads:
            thread.join()


def _until_done(done: queue.SimpleQueue[Outcome | BaseException | None], num_lanes: int) -> Iterator[Outcome | None]:
    """Yield outcomes as they come, and None after each wait in vain."""
    while num_lanes:
        try:
            item = done.get(timeout=WAIT_S)
        except queue.Empty:
            yield None
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            num_lanes -= 1
        else:
            yield item
