"""Runs cases on one device, opened once, in the process of a lane (lane_worker.py) or in this one."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from core.common.conformance import ConformanceProfile
from core.device import Device, PluginInfo
from core.errors import CoreError, error_json
from core.host.accelerators import installed_claims
from core.host.loading import describe
from core.host.plugin_metadata import AUTO
from core.host.selection import conformance_profile, select_device
from core_conformance.case import Case, CaseInfo
from core_conformance.outcome import Outcome, Status
from core_conformance.report.overview import one_line
from core_conformance.runner import suite
from core_conformance.runner.environment import environment
from core_conformance.runner.isolation import TorchState, seed_all
from core_conformance.runner.protocol import DEFAULT_THREADS, Collected, WorkerOptions
from core_conformance.trial import NotSupported, Skip, Trial

OnException = Callable[[BaseException], None]

_MAX_DETAIL = 20_000
# Modules loaded by a case (transformers, a compiler) are many objects, which every later collection would walk.
_MANY_MODULES = 100


class Session:
    """One device, opened once, and the cases that run on it, one at a time.

    own_process: the process is there for this alone, and a KeyboardInterrupt is a case's own. on_exception: called with
    what a case raised, as a debugger wants it, before the case fails.
    """

    def __init__(
        self, options: WorkerOptions, *, own_process: bool = False, on_exception: OnException | None = None
    ) -> None:
        self._options = options
        self._own_process = own_process
        self._on_exception = on_exception
        self._name = options.device
        self._opened: tuple[Device, ConformanceProfile] | Exception | None = None
        self._cases: dict[str, Case] = {case.id: case for case in suite.host_cases(options.suite.host)}
        self._complete = False
        self.usable = True
        self._num_frozen_modules = 0
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(options.threads or DEFAULT_THREADS)

    def open(self) -> tuple[Device, ConformanceProfile]:
        """Return the device and its plugin's profile, opened on first use; raise what opening it raised each time."""
        if self._opened is None:
            try:
                device = select_device(self._options.device)
                self._opened = (device, conformance_profile(device))
                # Cases ask for the device by name, and "auto" might be another one the next time.
                self._name = device.name if self._name == AUTO else self._name
            except Exception as error:
                self._opened = error
        if isinstance(self._opened, Exception):
            raise self._opened.with_traceback(None)
        return self._opened

    def collect(self, *, host_only: bool = False) -> Collected:
        """Return the cases to run. host_only: level 0 alone, without opening the device."""
        error, detail = None, ""
        try:
            if not host_only:
                self._collect()
        except Exception as caught:
            error, detail = _error(caught), traceback.format_exc()[-_MAX_DETAIL:]
        opened = self._opened if isinstance(self._opened, tuple) else None
        plugin = opened[0].plugin if opened else _plugin(self._name)
        return Collected(
            cases=tuple(case.info for case in self._cases.values()),
            name=self._name,
            error=error,
            detail=detail,
            plugin=plugin,
            environment=environment(opened[0] if opened else None, plugin).to_json(),
            not_supported=dict(opened[1].not_supported) if opened else {},
        )

    def run(self, case: CaseInfo) -> Outcome:
        """Run one case, named by its id; `usable` tells whether the device still works afterwards."""
        given = self._options
        trial = Trial(self._name, self.open, given.seed, given.fuzz, given.timeout_factor, given.ranks)
        # Inference needs no gradients; a case that does, as the checks of a custom op's registration, enables them.
        with torch.no_grad():
            before = TorchState.read()
            seed_all(self._options.seed)
            start = time.perf_counter()
            status, reason, detail = self._judged(case.id, trial)
            elapsed_s = time.perf_counter() - start
            leftovers = [f"left behind, and put back: {change}" for change in before.restore()]
        problem = self._tidy()
        if problem:
            leftovers.append(f"the device no longer works after this case: {problem}")
            if status == "pass":
                status, reason = "fail", leftovers[-1]
        self.usable = not problem
        return Outcome(
            id=case.id,
            status=status,
            reason=reason,
            detail=detail,
            elapsed_s=elapsed_s,
            measurements=tuple(trial.measurements),
            notes=(*trial.notes, *leftovers),
        )

    def close(self) -> None:
        """Give torch its threads back, and the garbage collector what was there before the cases."""
        torch.set_num_threads(self._threads_before)
        if self._num_frozen_modules:
            gc.unfreeze()

    def _collect(self) -> None:
        if self._complete:
            return
        device, profile = self.open()
        modules = self._options.suite
        cases = suite.collect(device, profile, fuzz=True, host=modules.host, collectors=modules.collectors)
        self._cases = {case.id: case for case in cases}
        self._complete = True

    def _case(self, case_id: str) -> Case:
        if case_id not in self._cases:
            self._collect()
        if case_id not in self._cases:
            raise LookupError("this process has not collected the case: what is collected must not vary")
        return self._cases[case_id]

    def _judged(self, case_id: str, trial: Trial) -> tuple[Status, str, str]:
        """Run the case and return status, reason and detail."""
        failures = trial.failures
        status: Status = "pass"
        reason = raised = ""
        try:
            self._case(case_id).run(trial)
            if isinstance(self._opened, tuple):
                # Queued work may still fail, and would then fail the next case.
                self._opened[0].synchronize()
        except NotSupported as caught:
            status, reason = "not-supported", one_line(str(caught))
        except Skip as caught:
            status, reason = "skip", one_line(str(caught))
        except BaseException as caught:
            if isinstance(caught, KeyboardInterrupt) and not self._own_process:
                raise
            if self._on_exception is not None:
                self._on_exception(caught)
            status = "fail"
            try:
                reason, raised = one_line(describe(caught)), traceback.format_exc()
            except Exception:  # the exception has no printable text
                reason = f"{type(caught).__name__}, whose own text raises"
        if failures:
            status, reason = "fail", _first(failures)
        detail = "\n".join([*failures, *filter(None, [raised])])
        return status, reason, detail[-_MAX_DETAIL:]

    def _tidy(self) -> str:
        """Free what the case held; return why the device can't be used any more, or ""."""
        gc.collect()
        if len(sys.modules) > self._num_frozen_modules + _MANY_MODULES:
            gc.freeze()
            self._num_frozen_modules = len(sys.modules)
        if isinstance(self._opened, tuple):
            try:
                self._opened[0].synchronize()
                self._opened[0].parts.empty_cache()
            except Exception as error:
                return one_line(describe(error))
        return ""


def _plugin(name: str) -> PluginInfo | None:
    entries = installed_claims(name.partition(":")[0])
    return entries[0].info if len(entries) == 1 else None


def _error(caught: Exception) -> dict[str, Any]:
    if isinstance(caught, CoreError):
        return error_json(caught)
    fields = {"asked": "the cases of the suite", "found": describe(caught), "remedy": "see the traceback", "notes": []}
    return {"type": type(caught).__name__, **fields}


def _first(failures: list[str]) -> str:
    return one_line(failures[0]) + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else "")
