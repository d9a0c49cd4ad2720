"""The account of a compile while it runs: what it notes, leaves out and counts, and the report that becomes of it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from core.compilation.report import BucketReport, CacheReport, ProgramReport, TraceReport
from core.errors import CaptureError, TraceError, one_line

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.options import Progress
    from core.compilation.request import CompileRequest
    from core.device import Mode

log = logging.getLogger("core.compilation.compile")


@dataclass(slots=True)
class Account:
    """What a compile has done so far. dropped: buckets left out, each with the reason."""

    start: float = field(default_factory=time.perf_counter)
    notes: list[str] = field(default_factory=list)
    buckets: list[BucketReport] = field(default_factory=list)
    dropped: dict[GraphKey, str] = field(default_factory=dict)
    num_kernels: int = 0

    def note(self, note: str) -> None:
        """Say, once, what is done otherwise than asked or preferred."""
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
        """Return the report of the finished compile, options that nothing used among the notes."""
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
            cache=cache or CacheReport(),
            dropped=dict(self.dropped),
            notes=(*(device.lowerings.notes(wanted) if lowered else ()), *self.notes),
        )


def _accounted(reports: Sequence[TraceReport]) -> tuple[TraceReport, ...]:
    """Have another phase account for a trace whose own phase runs without one after all."""
    own, heirs = {report.phase for report in reports}, dict[str, str]()
    for report in reports:
        if report.trace_of and report.trace_of not in own:
            heirs.setdefault(report.trace_of, report.phase)
    owners = ((report, heirs.get(report.trace_of, report.trace_of)) for report in reports)
    return tuple(replace(report, trace_of="" if owner == report.phase else owner) for report, owner in owners)


class Teller:
    """Tells the caller how many captures are done, on the first rank only."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress if _is_first_rank() else None
        self._total, self._done = total, 0

    def begin(self, key: GraphKey) -> None:
        """Tell that a key is about to be captured."""
        if self._progress is not None:
            self._progress(f"capture {key}", self._done, self._total)
        self._done += 1

    def end(self) -> None:
        """Tell that all are captured."""
        if self._progress is not None:
            self._progress("capture", self._total, self._total)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def reason_of(error: TraceError | CaptureError) -> str:
    """Return in one line why a model could not be traced or captured, and at which place of its code."""
    text = " ".join(error.found.split())
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    why = re.split(r"\s(?:(?:Hint|Developer debug context):\s|The branch condition involves)", error.found)[0]
    why = one_line(re.sub(r"\s+Explanation:", ":", why))
    return f"{why} ({places[-1][0].rsplit('/')[-1]}:{places[-1][1]})" if places else why
