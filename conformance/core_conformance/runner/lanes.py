"""Where cases run, one after the other: a worker process that may be lost, or this process for a debugger."""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from core.host.workers.pool import PersistentWorker, WorkerResult
from core_conformance.outcome import Outcome, Status
from core_conformance.runner.protocol import CaseInfo, Collected, WorkerOptions

if TYPE_CHECKING:
    from core_conformance.runner.worker import OnException

WORKER = "core_conformance.runner.lane_worker"
COLLECT_TIMEOUT_S = 300.0
"""For importing torch and the plugin, opening the device and listing the cases."""

# A device that hangs when it is opened would cost that time once for each case that is left.
_MAX_FAILED_STARTS = 2


class Lane(Protocol):
    """Collects and runs cases, one at a time."""

    def collect(self) -> Collected:
        """Open the device and return what there is to run; raise nothing where that fails."""
        ...

    def run(self, case: CaseInfo) -> Outcome:
        """Run a case and return what became of it, whatever that is."""
        ...

    def close(self) -> None:
        """Give everything back; from any thread, and again."""
        ...


class ProcessLane:
    """Runs cases in a worker process, which is started on first use and again after a case has taken it down.

    timeout_factor: multiplies the time that each case, and collecting, may take.
    """

    def __init__(self, options: WorkerOptions, *, timeout_factor: float = 1.0) -> None:
        self._worker = PersistentWorker(WORKER, options.to_argument())
        self._options = options
        self._timeout_factor = timeout_factor
        self._host_only = False
        self._previous = ""
        self._num_failed_starts = 0

    def collect(self) -> Collected:
        """Start the process, open the device and return what there is to run.

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
        notes = self._started_again()
        if isinstance(notes, Outcome):
            return replace(notes, id=case.id)
        timeout_s = case.timeout_s * self._timeout_factor
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
        return self._worker.request({"collect": what}, timeout_s=COLLECT_TIMEOUT_S * self._timeout_factor)

    def _started_again(self) -> tuple[str, ...] | Outcome:
        """Have a process that has collected, so that this takes no time of the case's; return notes, or a failure."""
        ended = self._worker.lost()
        if not self._worker.running:
            if self._num_failed_starts >= _MAX_FAILED_STARTS:
                reason = f"not run: {self._num_failed_starts} new processes in a row could not open the device"
                return Outcome(id="", status="crash", reason=reason)
            result = self._ask_for_cases()
            if result.answer is None:
                self._num_failed_starts += 1
                return _lost("", result, 0.0, "a new process for it could not open the device: it ")
            self._num_failed_starts = 0
        return (f"before it, the process {ended} when {self._previous} was over",) if ended else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _lost(case_id: str, result: WorkerResult, elapsed_s: float, prefix: str = "its process ") -> Outcome:
    status: Status = "timeout" if result.timed_out else "crash"
    reason = f"{prefix}{result.problem}"
    return Outcome(id=case_id, status=status, reason=reason, detail=result.output, elapsed_s=elapsed_s)


class LocalLane:
    """Runs cases in this process, where a debugger can stop them: nothing is isolated, and there are no deadlines."""

    def __init__(self, options: WorkerOptions, *, on_exception: OnException | None = None) -> None:
        from core_conformance.runner.worker import Session

        self._session = Session(options, on_exception=on_exception)

    def collect(self) -> Collected:
        """Open the device and return what there is to run."""
        return self._session.collect()

    def run(self, case: CaseInfo) -> Outcome:
        """Run a case."""
        return self._session.run(case.id)[0]

    def close(self) -> None:
        """End the session; the device stays open, as everything that a process has opened."""
        self._session.close()
