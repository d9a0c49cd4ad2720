"""The spread of measured ratios, by area and dtype: the table of the HTML page in which every value is counted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from core_conformance.case import AREAS
from core_conformance.outcome import Measurement, Outcome
from core_conformance.report.overview import one_line, ratio_text
from core_conformance.report.report import Report

BOUNDS = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 10.0, 100.0, math.inf)
"""Upper ends of the columns, inclusive. A ratio beyond 1 fails; the last column also holds NaN."""
HEADS = ("0", *(f"≤ {bound:g}" for bound in BOUNDS[1:-1]), "more")

_Measured = tuple[int, Outcome, Measurement]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioCell:
    """The values of one area and dtype between two bounds."""

    count: int
    failed: bool
    #: Share of the row's values, in per cent.
    share: int
    #: Position in the report of the case that the worst of these values belongs to.
    case: int
    #: The name of that value.
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioRow:
    """The values of one area and dtype, by column of `HEADS`; None where there are none."""

    label: str
    num_values: int
    worst: str
    cells: tuple[RatioCell | None, ...]


def ratio_rows(report: Report) -> list[RatioRow]:
    """Count every measured value; no rows where nothing was measured."""
    groups: dict[tuple[str, str], list[_Measured]] = {}
    for number, outcome in enumerate(report.outcomes):
        for item in outcome.measurements:
            groups.setdefault((outcome.area, item.dtype), []).append((number, outcome, item))
    order = sorted(groups, key=lambda key: (list(AREAS).index(key[0]), key[1]))
    return [_row(" ".join(filter(None, key)), groups[key]) for key in order]


def _row(label: str, values: Sequence[_Measured]) -> RatioRow:
    columns: list[list[_Measured]] = [[] for _ in BOUNDS]
    for value in values:
        columns[bisect_left(BOUNDS, _ordered(value))].append(value)
    worst = max(map(_ordered, values))
    cells = tuple(_cell(column, len(values)) if column else None for column in columns)
    return RatioRow(label=label, num_values=len(values), worst=ratio_text(worst), cells=cells)


def _cell(values: Sequence[_Measured], total: int) -> RatioCell:
    number, outcome, item = max(values, key=lambda value: (bool(value[2].reason), _ordered(value)))
    reason = f": {one_line(item.reason, 160)}" if item.reason else ""
    return RatioCell(
        count=len(values),
        failed=bool(item.reason) or not item.ratio <= 1,
        share=math.ceil(100 * len(values) / total),
        case=number,
        text=f"{outcome.id}: {item.criterion} {one_line(item.name, 120)} {ratio_text(item.ratio)}{reason}",
    )


def _ordered(value: _Measured) -> float:
    """Return a ratio that can be ordered."""
    ratio = value[2].ratio
    return math.inf if math.isnan(ratio) else ratio
