"""Collects notes, dropped buckets and counts while a compile runs, and makes the report from them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from core.compilation.report import CacheReport, ProgramReport, TraceReport
from core.errors import CaptureError, TraceError, one_line

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.capture.bucket_report import BucketReport
    from core.compilation.options import Progress
    from core.compilation.request import CompileRequest
    from core.device import Mode

log = logging.getLogger("core.compilation.compile")


@dataclass(slots=True)
class Account:
    """What a compile has done so far."""

    start: float = field(default_factory=time.perf_counter)
    notes: list[str] = field(default_factory=list)
    buckets: list[BucketReport] = field(default_factory=list)
    #: Buckets without a graph because the device ran out of room, each with the reason.
    dropped: dict[GraphKey, str] = field(default_factory=dict)
    num_kernels: int = 0
    num_ahead: int = 0
    ahead_s: float = 0.0
    num_measured: int = 0

    def note(self, note: str) -> None:
        """Log and keep, once each, a note that something is done differently than asked or preferred."""
        if note not in self.notes:
            log.warning(note)
            self.notes.append(note)

    def begin_captures(self) -> None:
        """Forget the captures so far: all start anew."""
        self.buckets.clear()
        self.dropped.clear()

    def report(
        self,
        request: CompileRequest,
        modes: Mapping[str, Mode],
        traces: Sequence[TraceReport] = (),
        *,
        static_bytes: int = 0,
        cache: CacheReport | None = None,
    ) -> ProgramReport:
        """Return the report of the finished compile; its notes also name options that nothing used."""
        device, eager, wanted = request.device, request.options.eager, request.options.lowering
        if eager and "segmented" not in modes.values():
            self.note(f"eager={eager!r} is not used: no phase runs 'segmented'")
        lowered = request.traced and any(mode not in ("segmented", "off") for mode in modes.values())
        return ProgramReport(
            device=device.name,
            plugin=str(device.plugin),
            modes=dict(modes),
            lowering=device.lowerings.resolve(wanted)[0] if request.traced else "none",
            traces=_accounted(traces),
            buckets=tuple(self.buckets),
            static_bytes=static_bytes,
            total_s=time.perf_counter() - self.start,
            num_kernels=self.num_kernels,
            num_ahead=self.num_ahead,
            ahead_s=self.ahead_s,
            num_measured=self.num_measured,
            cache=cache or CacheReport(),
            dropped=dict(self.dropped),
            notes=(*(device.lowerings.notes(wanted) if lowered else ()), *self.notes),
        )


def _accounted(reports: Sequence[TraceReport]) -> tuple[TraceReport, ...]:
    """Charge a shared trace to the first phase that still uses it, after the trace's own phase fell back to no
    trace."""
    known = {"", *(report.phase for report in reports)}
    sharing = {report.trace_of: report.phase for report in reversed(reports) if report.trace_of not in known}

    def owner(report: TraceReport) -> str:
        phase = sharing.get(report.trace_of)
        return report.trace_of if phase is None else "" if phase == report.phase else phase

    return tuple(replace(report, trace_of=owner(report)) for report in reports)


def num_ranks() -> int:
    """Return of how many ranks this process is one."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def on_first_rank(progress: Progress | None) -> Progress:
    """Return the progress function: the caller's on the first rank, on other ranks one that does nothing."""
    other = num_ranks() > 1 and torch.distributed.get_rank() > 0
    return (lambda what, done, total: None) if progress is None or other else progress


def reason_of(error: TraceError | CaptureError) -> str:
    """Return in one line why a model could not be traced or captured, and at which place of its code."""
    text = " ".join(error.found.split())
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    why = re.split(r"\s(?:(?:Hint|Developer debug context):\s|The branch condition involves)", error.found)[0]
    why = one_line(re.sub(r"\s+Explanation:", ":", why))
    return f"{why} ({places[-1][0].rsplit('/')[-1]}:{places[-1][1]})" if places else why
