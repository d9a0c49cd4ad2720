"""Where each mark of the HTML page's plots stands: ratios of error to bound on a log axis, and time by area.

The template draws them as SVG: in the colours of the page's light or dark theme, each dot with a tooltip that names its
case, equal for equal reports. A plotting library gives none of these, for a dozen more packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from core_conformance.case import AREAS
from core_conformance.outcome import Measurement, Outcome
from core_conformance.report.overview import AreaRow, one_line, ratio_text, seconds_text
from core_conformance.report.report import Report

WIDTH = 960
_LEFT, _RIGHT = 190, 60
_ROW_HEIGHT = 30
_TOP = 26
_STEP = 6
_LANES = (0, 5, -5, 10, -10)
"""Dots that would cover each other stand above and below the middle of the row; further ones are left out."""
_MAX_DOTS = 1800
_LEAST = -4
_MOST = 6
_MAX_FAILED = 800


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One measured value. case: position of its case in the report."""

    x: float
    y: float
    failed: bool
    case: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DotRow:
    """The values of one area and dtype. y: middle of the row. num_values: measured, shown or not."""

    label: str
    y: float
    num_values: int
    worst: str
    failed: bool
    dots: tuple[Dot, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioPlot:
    """Ratios of error to bound. ticks: place and label on the axis. bound: where the ratio is 1."""

    width: int
    height: float
    left: float
    right: float
    top: float
    bottom: float
    ticks: tuple[tuple[float, str], ...]
    bound: float
    rows: tuple[DotRow, ...]
    num_shown: int
    num_values: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Time of one area."""

    label: str
    y: float
    width: float
    text: str


@dataclass(slots=True)
class _Axis:
    """A log axis with a place for 0 at its left end and one for what is infinite at its right one."""

    decades: int
    infinite: bool
    zero: float = field(default=_LEFT + 14.0)

    @property
    def left(self) -> float:
        return self.zero + 56

    @property
    def right(self) -> float:
        return WIDTH - _RIGHT - (40 if self.infinite else 0)

    def x(self, ratio: float) -> float:
        if ratio == 0:
            return self.zero
        if not math.isfinite(ratio):
            return WIDTH - _RIGHT - 14.0
        place = min(max(math.log10(ratio), _LEAST), self.decades)
        return self.left + (place - _LEAST) / (self.decades - _LEAST) * (self.right - self.left)

    def ticks(self) -> Iterator[tuple[float, str]]:
        yield self.zero, "0"
        for decade in range(_LEAST, self.decades + 1):
            ends = {_LEAST: "≤ ", _MOST: "≥ "}.get(decade, "")
            yield self.x(10.0**decade), f"{ends}{10.0**decade:.10g}"
        if self.infinite:
            yield self.x(math.inf), "∞"


def ratio_plot(report: Report) -> RatioPlot | None:
    """Lay out every measured value, thinned out where dots would cover each other; None where nothing was measured.

    What failed is always shown, unless that is more than a page can hold.
    """
    groups: dict[tuple[str, str], list[tuple[int, Outcome, Measurement]]] = {}
    for number, outcome in enumerate(report.outcomes):
        for item in outcome.measurements:
            groups.setdefault((outcome.area, item.dtype), []).append((number, outcome, item))
    if not groups:
        return None
    values = [item for group in groups.values() for _, _, item in group]
    ratios = [item.ratio for item in values if math.isfinite(item.ratio) and item.ratio > 0]
    decades = min(max(math.ceil(math.log10(max(ratios, default=1.0))), 1), _MOST)
    axis = _Axis(decades, infinite=any(not math.isfinite(item.ratio) for item in values))
    keep_failed = sum(map(_failed, values)) <= _MAX_FAILED
    order = sorted(groups, key=lambda key: (list(AREAS).index(key[0]), key[1]))
    for num_lanes in range(len(_LANES), 0, -1):
        rows = tuple(_row(key, groups[key], axis, at, num_lanes, keep_failed) for at, key in enumerate(order))
        if sum(len(row.dots) for row in rows) <= _MAX_DOTS:
            break
    bottom = _TOP + _ROW_HEIGHT * len(rows)
    return RatioPlot(
        width=WIDTH,
        height=bottom + 24,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        bottom=bottom,
        ticks=tuple((round(x, 1), label) for x, label in axis.ticks()),
        bound=round(axis.x(1.0), 1),
        rows=rows,
        num_shown=sum(len(row.dots) for row in rows),
        num_values=len(values),
    )


def time_bars(rows: list[AreaRow]) -> list[Bar]:
    """Lay out the time that each area took."""
    longest = max((row.elapsed_s for row in rows), default=0.0) or 1.0
    room = WIDTH - _LEFT - 170
    return [
        Bar(
            label=row.area,
            y=index * 24.0,
            width=round(max(row.elapsed_s / longest * room, 1.0), 1),
            text=f"{seconds_text(row.elapsed_s)}, {row.total} case{'' if row.total == 1 else 's'}",
        )
        for index, row in enumerate(rows)
    ]


def _failed(item: Measurement) -> bool:
    return bool(item.reason) or not item.ratio <= 1


def _row(
    key: tuple[str, str],
    group: list[tuple[int, Outcome, Measurement]],
    axis: _Axis,
    index: int,
    num_lanes: int,
    keep_failed: bool,
) -> DotRow:
    middle = _TOP + _ROW_HEIGHT * (index + 0.5)
    taken: dict[int, int] = {}
    dots = []
    # Failed ones first, and each kind from the worst down: what is left out is never the worst of its place.
    for number, outcome, item in sorted(group, key=lambda each: (not _failed(each[2]), -_finite(each[2].ratio))):
        x = axis.x(item.ratio)
        place = round(x / _STEP)
        lane = taken.get(place, 0)
        taken[place] = lane + 1
        if lane >= num_lanes and not (_failed(item) and keep_failed):
            continue
        reason = f": {one_line(item.reason, 160)}" if item.reason else ""
        dot = Dot(
            x=round(x, 1),
            y=middle + _LANES[lane % len(_LANES)],
            failed=_failed(item),
            case=number,
            text=f"{outcome.id}: {item.criterion} {one_line(item.name, 120)} {ratio_text(item.ratio)}{reason}",
        )
        dots.append(dot)
    worst = max(_finite(item.ratio) for _, _, item in group)
    return DotRow(
        label=" ".join(filter(None, key)),
        y=middle,
        num_values=len(group),
        worst=ratio_text(worst),
        failed=any(_failed(item) for _, _, item in group),
        dots=tuple(dots),
    )


def _finite(ratio: float) -> float:
    """Return a ratio that can be ordered."""
    return math.inf if math.isnan(ratio) else ratio
