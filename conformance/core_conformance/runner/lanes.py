"""Lanes, which run cases one after the other: in a worker process that may crash (`worker.Session` runs them in this
one).

The parent keeps each case's deadline, and kills the process: docs/conformance.md says what pytest-xdist and
pytest-timeout lack for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from core.host.workers.worker import PersistentWorker, WorkerResult
from core_conformance.case import CaseInfo
from core_conformance.outcome import Outcome, Status
from core_conformance.runner.protocol import Collected, WorkerOptions

WORKER = "core_conformance.runner.lane_worker"
COLLECT_TIMEOUT_S = 300.0
"""For importing torch and the plugin, opening the device and listing the cases."""

# A device that takes each process down would cost a start for each case that is left. For a device that hangs on
# opening, `Opening` prevents a second try.
_MAX_FAILED_STARTS = 2


class Lane(Protocol):
    """Collects and runs cases, one at a time."""

    def collect(self) -> Collected:
        """Open the device and return the cases to run; a failure is reported in the result, not raised."""

    def run(self, case: CaseInfo) -> Outcome:
        """Run a case and return what became of it, whatever that is."""

    def close(self) -> None:
        """Release everything; may be called from any thread and repeatedly."""


class Opening:
    """Whether the device opens, shared by the lanes of a run: after a hang no lane opens it again."""

    def __init__(self) -> None:
        self._hung: WorkerResult | None = None
        # The case that was reported as the time-out.
        self._judged = ""
        self._lock = threading.Lock()

    def note(self, result: WorkerResult) -> None:
        """Note whether a process managed to open the device."""
        if result.timed_out:
            self._hung = result

    def outcome(self, case: CaseInfo) -> Outcome | None:
        """Return the outcome of a case that can't run since the device hung: a time-out for the first, else a skip."""
        with self._lock:
            if self._hung is None or not case.opens:
                return None
            if not self._judged:
                self._judged = case.id
                return _lost(case.id, self._hung, 0.0, "the process that opened the device and listed the cases ")
        reason = f"not run: the device hung when it was opened, for which {self._judged} is judged"
        return Outcome(id=case.id, status="skip", reason=reason)


class ProcessLane:
    """Runs cases in a worker process, which is started on first use and again after a case has taken it down.

    opening: what all lanes of a run know of the device; environment: variables that the process has besides this one's.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        opening: Opening | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._opening = opening or Opening()
        self._worker = PersistentWorker(WORKER, {"options": options.to_argument()}, **(environment or {}))
        self._options = options
        self._host_only = False
        self._previous = ""
        self._num_failed_starts = 0

    def collect(self) -> Collected:
        """Start the process, open the device and return the cases to run.

        Where the process does not survive that, level 0 is still there, and `error` says why the rest is not.
        """
        result = self._ask_for_cases()
        if result.answer is not None:
            return Collected.from_json(result.answer)
        found = f"the process that opened the device and listed them {result.problem}"
        error = {
            "type": "PluginError",
            "asked": f"the conformance cases of device {self._options.device!r}",
            "found": found,
            "remedy": "see what the process printed; `core doctor` opens the device alone",
            "notes": [],
        }
        self._host_only = True
        host = self._ask_for_cases()
        # Without any answer the suite itself can't be imported: there is nothing to go on with.
        without = Collected(cases=(), name=self._options.device)
        collected = without if host.answer is None else Collected.from_json(host.answer)
        return replace(collected, error=error, detail=result.output)

    def run(self, case: CaseInfo) -> Outcome:
        """Run a case; a crash or a missed deadline is an outcome too."""
        notes = self._ensure_started(case)
        if isinstance(notes, Outcome):
            return notes
        timeout_s = case.timeout_s * self._options.timeout_factor
        start = time.perf_counter()
        result = self._worker.request({"run": case.id, "timeout_s": timeout_s}, timeout_s=timeout_s)
        if result.answer is None:
            outcome = _lost(case.id, result, time.perf_counter() - start)
        else:
            outcome = Outcome.from_json(result.answer["outcome"])
            if not result.answer["usable"]:
                self._worker.kill()
        self._previous = case.id
        return replace(outcome, notes=(*outcome.notes, *notes))

    def close(self) -> None:
        """End the process; a case under way ends too."""
        self._worker.close()

    def _ask_for_cases(self) -> WorkerResult:
        what = "host" if self._host_only else "all"
        timeout_s = COLLECT_TIMEOUT_S * self._options.timeout_factor
        result = self._worker.request({"collect": what}, timeout_s=timeout_s)
        self._opening.note(result)
        return result

    def _ensure_started(self, case: CaseInfo) -> tuple[str, ...] | Outcome:
        """Start a process where none runs, outside of the case's time; return notes on the one before, or a failure."""
        ended = self._worker.lost()
        # A process that listed the cases of level 0 alone has not opened the device.
        hung = self._opening.outcome(case) if self._host_only or not self._worker.running else None
        if hung is not None:
            return hung
        if not self._worker.running:
            if self._num_failed_starts >= _MAX_FAILED_STARTS:
                reason = f"not run: {self._num_failed_starts} new processes in a row could not open the device"
                return Outcome(id=case.id, status="crash", reason=reason)
            result = self._ask_for_cases()
            if result.answer is None:
                self._num_failed_starts += 1
                again = _lost(case.id, result, 0.0, "a new process for it could not open the device: it ")
                return self._opening.outcome(case) or again
            self._num_failed_starts = 0
        return (f"before it, the process {ended} when {self._previous} was over",) if ended else ()


def _lost(case_id: str, result: WorkerResult, elapsed_s: float, prefix: str = "its process ") -> Outcome:
    status: Status = "timeout" if result.timed_out else "crash"
    reason = f"{prefix}{result.problem}"
    return Outcome(id=case_id, status=status, reason=reason, detail=result.output, elapsed_s=elapsed_s)
