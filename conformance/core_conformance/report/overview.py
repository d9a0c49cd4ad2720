"""The content of all forms of a report: the state of each level, numbers by area, failures, and declarations."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core_conformance.case import AREAS, MAX_LEVEL
from core_conformance.outcome import BAD, STATUSES, Outcome, Status
from core_conformance.ranks import is_ranked
from core_conformance.report.report import Report, worst_ratio

State = Literal["proven", "not proven", "not judged", "not asked for"]

STATUS_MEANINGS: dict[Status, str] = {
    "pass": "ran, and everything it judged is right",
    "fail": "ran, and something it judged is wrong, or it raised an error",
    "not-supported": "declared by the plugin as beyond the device; it did not count as passed",
    "xfail": "listed as an expected failure, and failed; it grants no level",
    "xpass": "listed as an expected failure, and passed: the list is out of date",
    "crash": "the process that ran it died",
    "timeout": "it took longer than it may, and its process was ended",
    "skip": "this environment lacks what it needs; it grants no level",
}
LEVELS_RULE = (
    "A level is proven where every case of it and of the levels below passed or is declared not supported, "
    "and each of its areas has a pass."
)
CRITERIA: dict[str, str] = {
    "T0": "Equal: shapes, dtypes, strides, positions of NaN and infinity, integers and booleans; for capture and "
    "replay, every bit. What is counted (codes of a quantisation that lie one step off, bytes not given back) stays "
    "below a small share.",
    "T1": "Against a reference computed in fp64 on the host from the same rounded inputs: the root mean square error "
    "of what is judged is at most twice (below 512 elements three times) that of plain eager execution on the same "
    "device, and its largest error at most three times eager's, each plus a floor of a quarter of the dtype's epsilon.",
    "T2": "The yardstick itself: the error of the device's own eager execution is at most 4 times that of the host's.",
    "T3": "Whole models: the same greedy tokens as eager execution, another one only where the fp64 margin of the two "
    "best is smaller than the error; and a distribution of the next token whose divergence from fp64 is at most "
    "8 times eager's.",
}
"""What the names of criteria stand for; `tolerances` holds the numbers and where they come from."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Everything that XML 1.0 has no place for: control characters, lone surrogates, two noncharacters.
_UNPRINTABLE = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class AreaRow:
    """One area in numbers."""

    area: str
    #: None for fuzzing, which proves no level.
    level: int | None
    covers: str
    #: Number of cases by status.
    counts: Counter[str]
    #: The largest ratio of error to bound; None where nothing was measured.
    worst: float | None
    #: Id of the case that has it; "" where nothing was measured.
    worst_id: str
    elapsed_s: float

    @property
    def total(self) -> int:
        """Number of cases."""
        return self.counts.total()


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelRow:
    """One level: what it covers, and its state."""

    level: int
    covers: tuple[str, ...]
    state: State
    #: Why the level is not proven; "" where it is.
    reason: str
    counts: Counter[str]


def plain(text: str) -> str:
    """Return text that a terminal, XML and HTML can show: without escape sequences and control characters."""
    return _UNPRINTABLE.sub("", _ANSI.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, limit: int = 500) -> str:
    """Return text as one line of at most that many characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio for people; "" for None."""
    if ratio is None:
        return ""
    return f"{ratio:.3g}" if math.isfinite(ratio) else "inf"


def seconds_text(seconds: float) -> str:
    """Return a time for people, as seconds below a minute."""
    if seconds < 0.95:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 59.95 else f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"


def counts_text(counts: Counter[str]) -> str:
    """Return numbers by status as one line, those that are not 0."""
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "no cases"


def printable(report: Report) -> Report:
    """Return the report with every text made `plain`: what plugins, exceptions and processes say may hold anything."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return plain(value)
        if isinstance(value, dict):
            return {clean(name): clean(item) for name, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list | tuple) else value

    return Report.from_json(clean(report.to_json()))


def area_rows(report: Report) -> list[AreaRow]:
    """Return a row for each area that has cases, in order of the levels."""
    rows = []
    for area, (level, covers) in AREAS.items():
        outcomes = [outcome for outcome in report.outcomes if outcome.area == area]
        if outcomes:
            ratios = [(ratio, o.id) for o in outcomes if (ratio := worst_ratio(o)) is not None]
            worst, worst_id = max(ratios, key=lambda pair: pair[0], default=(None, ""))
            row = AreaRow(
                area=area,
                level=level if level <= MAX_LEVEL else None,
                covers=covers,
                counts=Counter(outcome.status for outcome in outcomes),
                worst=worst,
                worst_id=worst_id,
                elapsed_s=sum(outcome.elapsed_s for outcome in outcomes),
            )
            rows.append(row)
    return rows


def level_rows(report: Report) -> list[LevelRow]:
    """Return the state of each level."""
    rows = []
    for level in range(MAX_LEVEL + 1):
        areas = {area: covers for area, (own, covers) in AREAS.items() if own == level}
        state, reason = _state(report, level)
        row = LevelRow(
            level=level,
            covers=tuple(f"{area}: {covers}" for area, covers in areas.items()),
            state=state,
            reason=reason,
            counts=Counter(outcome.status for outcome in report.outcomes if outcome.area in areas),
        )
        rows.append(row)
    return rows


def _state(report: Report, level: int) -> tuple[State, str]:
    if report.reached is not None and level <= report.reached:
        return "proven", ""
    if level > report.level:
        return "not asked for", f"this run was asked for levels up to {report.level}"
    if report.chosen:
        return "not judged", "only some cases were chosen: a level takes all of them"
    following = 0 if report.reached is None else report.reached + 1
    if level > following:
        return "not proven", f"level {following} comes first"
    return "not proven", f"{len(report.obstacles)} obstacle" + ("" if len(report.obstacles) == 1 else "s")


def headline(report: Report) -> str:
    """Return the outcome in a few words."""
    if report.reached is not None:
        asked = "" if report.level in (MAX_LEVEL, report.reached) else f", asked for {report.level}"
        excused = sum(outcome.excused for outcome in report.outcomes)
        left_out = f", {excused} excused by its profile" if excused else ""
        return f"LEVEL {report.reached} OF {MAX_LEVEL}{left_out}{asked}"
    return "NO LEVEL JUDGED" if report.chosen else "NO LEVEL REACHED"


def subject(report: Report) -> str:
    """Return the device, its product and its plugin as one line."""
    product = f": {report.environment.device_name}" if report.environment.device_name else ""
    plugin = "no plugin" if report.plugin is None else f"plugin {report.plugin}"
    return one_line(f"{report.name}{product} ({plugin})")


def ranks_text(report: Report) -> str:
    """Return what became of the cases that run in several processes, as one line; "" where there are none."""
    outcomes = [outcome for outcome in report.outcomes if is_ranked(outcome.id)]
    if not outcomes:
        return ""
    worst = max((ratio for outcome in outcomes if (ratio := worst_ratio(outcome)) is not None), default=None)
    nearest = "" if worst is None else f", worst ratio {ratio_text(worst)}"
    return f"in {report.ranks} processes: {counts_text(Counter(outcome.status for outcome in outcomes))}{nearest}"


def with_status(outcomes: Iterable[Outcome], *statuses: Status) -> list[Outcome]:
    """Return the outcomes of these statuses, in order."""
    return [outcome for outcome in outcomes if outcome.status in statuses]


def failures(report: Report) -> list[Outcome]:
    """Return what makes the run fail, in order."""
    return [outcome for outcome in report.outcomes if outcome.status in BAD]


def by_reason(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """Return the ids of the cases for each reason, in order of the first."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        found.setdefault(one_line(outcome.reason) or "no reason given", []).append(outcome.id)
    return found


def slowest(report: Report, count: int) -> list[Outcome]:
    """Return the cases that took longest, the longest first."""
    ran = [outcome for outcome in report.outcomes if outcome.elapsed_s > 0]
    return sorted(ran, key=lambda outcome: (-outcome.elapsed_s, outcome.id))[:count]
