"""A report for a terminal: the level first, numbers by area, then what is wrong and how to run it again."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from core_conformance.outcome import BAD, STATUSES, Outcome
from core_conformance.report.overview import (
    area_rows,
    by_reason,
    counts_text,
    failures,
    headline,
    level_rows,
    one_line,
    printable,
    ranks_text,
    ratio_text,
    seconds_text,
    slowest,
    subject,
)
from core_conformance.report.report import Report

WIDTH = 100
_MAX_FAILURES = 40
_MAX_OBSTACLES = 3
_MAX_IDS = 4
_SLOWEST = 3
_FEW = 3
_STYLES = {"pass": "green", "xfail": "yellow", "skip": "yellow", "not-supported": "dim"} | dict.fromkeys(BAD, "red")
_WORDS = {"fail": "FAIL", "xpass": "XPASS", "crash": "CRASH", "timeout": "TIMEOUT"}


def to_text(report: Report, *, width: int = WIDTH) -> str:
    """Return what `print_report` prints as plain text, at most `width` columns but for commands, which stay whole."""
    file = StringIO()
    print_report(report, Console(file=file, width=width, highlight=False, color_system=None))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Print the report. A run of a few cases is told in full: its measurements, notes and tracebacks.

    Commands are never broken into lines. What a vendor's text holds of markup or escape sequences has no effect.
    """
    report = printable(report)
    # Text folds at 100 columns also where lines may be longer: nobody reads a line of 200.
    for item, is_whole in _items(report, full=len(report.outcomes) <= _FEW):
        console.print(item, soft_wrap=is_whole, width=None if is_whole else min(console.width, WIDTH))


def _items(report: Report, *, full: bool) -> Iterator[tuple[Any, bool]]:
    """Yield what to print, and whether its lines must stay whole."""
    yield Text(subject(report), style="bold"), False
    yield _headline(report), False
    yield from ((item, False) for item in _obstacles(report))
    if report.outcomes:
        yield _areas(report), False
    if ranked := ranks_text(report):
        yield Text(f"Cases {ranked}"), False
    failed = failures(report)
    for outcome in report.outcomes if full else failed[:_MAX_FAILURES]:
        yield from _case(report, outcome, full=full)
    if not full and len(failed) > _MAX_FAILURES:
        yield (
            Text(
                f"and {len(failed) - _MAX_FAILURES} more that failed: the JSON and HTML reports have them all",
                style="red",
            ),
            False,
        )
    declared = list(_declared(report))
    yield from ((item, False) for item in declared)
    if declared or full or failed:
        yield Text(), False
    yield _last_line(report), False


def _headline(report: Report) -> Text:
    if report.reached is None:
        style = "bold white on red" if not report.chosen else "bold"
    else:
        style = "bold white on green" if report.reached >= report.level else "bold black on yellow"
    return Text.assemble("\n", (f" {headline(report)} ", style), "  ", counts_text(report.counts))


def _obstacles(report: Report) -> Iterator[Any]:
    found = report.obstacles
    if not found or report.chosen:
        return
    level = 0 if report.reached is None else report.reached + 1
    covers = "; ".join(level_rows(report)[level].covers)
    yield Text(f"\nIn the way of level {level} ({covers}):")
    for line in found[:_MAX_OBSTACLES]:
        yield _indented(one_line(line, 200))
    if len(found) > _MAX_OBSTACLES:
        yield Text(f"  and {len(found) - _MAX_OBSTACLES} more")


def _areas(report: Report) -> Table:
    seen = [status for status in STATUSES if report.counts[status]]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, padding=(0, 1, 0, 0))
    table.add_column("area", no_wrap=True)
    for name in ("level", "cases", *(status.replace("-", "-\n") for status in seen), "worst\nratio", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in area_rows(report):
        level = "" if row.level is None else str(row.level)
        counts = (Text(str(row.counts[status] or ""), style=_STYLES[status]) for status in seen)
        table.add_row(row.area, level, str(row.total), *counts, ratio_text(row.worst), seconds_text(row.elapsed_s))
    return table


def _case(report: Report, outcome: Outcome, *, full: bool) -> Iterator[tuple[Any, bool]]:
    word = _WORDS.get(outcome.status, outcome.status)
    yield Text.assemble((word, f"bold {_STYLES[outcome.status]}"), " ", outcome.id), True
    if outcome.reason:
        yield _indented(one_line(outcome.reason)), False
    if full:
        for item in outcome.measurements:
            size = f", {item.num_elements} x {item.dtype}" if item.dtype else ""
            line = f"{item.criterion} {item.name}: {ratio_text(item.ratio)}{size}"
            yield _indented(one_line(line), "red" if item.reason else ""), False
        for text in filter(None, (*outcome.notes, outcome.detail)):
            yield _indented(text.strip(), "dim"), False
    yield Text(f"  {report.repro(outcome)}"), True


def _indented(text: str, style: str = "") -> Padding:
    """Return text that wraps within its indentation."""
    return Padding(Text(text, style=style), (0, 0, 0, 2))


def _declared(report: Report) -> Iterator[Any]:
    """Yield the outcomes that are neither failures nor passes, each reason once."""
    titles = {
        "not-supported": "Declared not supported",
        "xfail": "Expected failures",
        "skip": "Skipped: this environment lacks what they need",
    }
    for status, title in titles.items():
        found = [outcome for outcome in report.outcomes if outcome.status == status]
        if found:
            yield Text(f"\n{title} ({len(found)})", style="bold")
        for reason, ids in by_reason(found).items():
            rest = f", and {len(ids) - _MAX_IDS} more" if len(ids) > _MAX_IDS else ""
            yield _indented(f"{reason}: {', '.join(ids[:_MAX_IDS])}{rest}")


def _last_line(report: Report) -> Text:
    slow = ", ".join(f"{outcome.id} {seconds_text(outcome.elapsed_s)}" for outcome in slowest(report, _SLOWEST))
    workers = report.environment.workers
    took = f"{seconds_text(report.elapsed_s)}, {workers} worker{'' if workers == 1 else 's'}, seed {report.seed}"
    return Text(f"{headline(report)} in {took}" + (f"; slowest: {slow}" if slow else ""), style="dim")
