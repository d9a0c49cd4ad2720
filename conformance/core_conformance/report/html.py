"""A report as one HTML page, for whoever decides on a device: what assets/report.html.jinja shows.

The page holds its style and script and loads nothing; the template engine escapes all text. The page has a budget:
measurements that pass and the beginnings of long tracebacks are left out beyond it, and the page says how many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jinja2

from core_conformance.case import AREAS, MAX_LEVEL
from core_conformance.outcome import BAD, STATUSES, Measurement, Outcome
from core_conformance.report.overview import (
    CRITERIA,
    LEVELS_RULE,
    STATUS_MEANINGS,
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
    with_status,
)
from core_conformance.report.ratios import HEADS, ratio_rows
from core_conformance.report.report import Report, worst_ratio

_MEASUREMENTS = 2400
_LEAST_PER_CASE = 3
_MAX_FAILED_PER_CASE = 20
_DETAIL_CHARACTERS = 150_000
_LEAST_DETAIL, _MOST_DETAIL = 300, 6000
_MAX_NOTES = 20
_MAX_OBSTACLES = 5
_SLOWEST = 10
_CHARACTER_WIDTH = 6.6


def to_html(report: Report) -> str:
    """Return the page."""
    report = printable(report)
    return (
        _environment()
        .get_template("report.html.jinja")
        .render(
            report=report,
            subject=subject(report),
            headline=headline(report),
            standing=_standing(report),
            facts=list(_facts(report)),
            levels=level_rows(report),
            obstacles=[one_line(text) for text in report.obstacles[:_MAX_OBSTACLES]],
            num_obstacles=len(report.obstacles),
            areas=area_rows(report),
            ranks=ranks_text(report),
            statuses=[status for status in STATUSES if report.counts[status]],
            bad=BAD,
            heads=HEADS,
            ratios=ratio_rows(report),
            slowest=slowest(report, _SLOWEST),
            declared=by_reason(with_status(report.outcomes, "not-supported")),
            expected=with_status(report.outcomes, "xfail", "xpass"),
            skipped=by_reason(with_status(report.outcomes, "skip")),
            cases=list(_cases(report)),
            meanings=STATUS_MEANINGS,
            levels_rule=LEVELS_RULE,
            criteria=CRITERIA,
        )
    )


def to_badge(report: Report) -> str:
    """Return a small SVG image that says which level the device has reached by which plugin and suite."""
    parts = _badge_parts(report)
    widths = [round(len(text) * _CHARACTER_WIDTH) + 14 for text in parts]
    return (
        _environment()
        .get_template("badge.svg.jinja")
        .render(
            parts=[(text, sum(widths[:index]), widths[index]) for index, text in enumerate(parts)],
            width=sum(widths),
            standing=_standing(report),
        )
    )


def to_badge_json(report: Report) -> str:
    """Return what the badge says as the JSON document that shields.io draws badges from (its "endpoint" badge)."""
    label, level, plugin = _badge_parts(report)
    document = {
        "schemaVersion": 1,
        "label": label,
        "message": f"{level}, {plugin}",
        "color": {"good": "brightgreen", "part": "yellow", "bad": "red"}[_standing(report)],
    }
    return json.dumps(document, indent=2) + "\n"


def _badge_parts(report: Report) -> tuple[str, str, str]:
    """Return the three texts of a badge: which suite, what was reached, and by which plugin."""
    report = printable(report)
    level = headline(report).lower().replace(f" of {MAX_LEVEL}", "", 1)
    plugin = "no plugin" if report.plugin is None else str(report.plugin)
    return f"core conformance {report.suite}".rstrip(), level, one_line(plugin, 60)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("core_conformance", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(ratio=ratio_text, seconds=seconds_text, counts=counts_text, line=one_line)
    return environment


def _standing(report: Report) -> str:
    """Return the state of the level asked for in one word: good, part or bad."""
    if report.reached is None:
        return "part" if report.chosen and report.passed else "bad"
    return "good" if report.reached >= report.level else "part"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    environment, plugin = report.environment, report.plugin
    yield "product", environment.device_name or "(did not open)"
    if plugin is not None:
        requires = f", accepts core {plugin.requires_core}" if plugin.requires_core else ""
        yield "plugin", f"{plugin} ({plugin.entry_point}{requires})"
    versions = [(name, environment.versions.get(name)) for name in ("core", "torch", "python")]
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions if number)
    if environment.driver:
        yield "driver", environment.driver
    yield "platform", environment.platform
    yield "date", f"{report.started}, took {seconds_text(report.elapsed_s)}"
    chosen = f"cases {' '.join(report.chosen)}" if report.chosen else f"all cases up to level {report.level}"
    fuzz = f", {report.fuzz} examples per fuzzing case" if report.fuzz else ""
    yield "asked for", f"{chosen}{fuzz}, seed {report.seed}"


def _cases(report: Report) -> Iterator[dict[str, Any]]:
    """Yield what the page shows of each case, within the page's budget."""
    keep = _share(len(report.outcomes))
    keep_failed = min(_MAX_FAILED_PER_CASE, _share(len(failures(report))))
    with_detail = sum(bool(outcome.detail) for outcome in report.outcomes)
    limit = min(max(_DETAIL_CHARACTERS // max(with_detail, 1), _LEAST_DETAIL), _MOST_DETAIL)
    for outcome in report.outcomes:
        level = AREAS[outcome.area][0]
        shown = _most_telling(outcome, keep, keep_failed)
        worst = worst_ratio(outcome)
        yield {
            "outcome": outcome,
            "level": level if level <= MAX_LEVEL else None,
            "what": report.cases.get(outcome.id, ""),
            "worst": worst,
            "sort": -1.0 if worst is None else min(worst, 1e300),
            "measurements": shown,
            "num_left_out": len(outcome.measurements) - len(shown),
            "detail": outcome.detail[-limit:],
            "detail_left_out": max(len(outcome.detail) - limit, 0),
            "notes": [one_line(note) for note in outcome.notes[:_MAX_NOTES]],
            "repro": report.repro(outcome),
        }


def _share(num_cases: int) -> int:
    """Return how many measurements each of these cases may show."""
    return max(_LEAST_PER_CASE, _MEASUREMENTS // max(num_cases, 1))


def _most_telling(outcome: Outcome, keep: int, keep_failed: int) -> list[Measurement]:
    """Return the measurements to show, as measured: those that fail, then those nearest to their bound."""
    measured = outcome.measurements
    order = sorted(range(len(measured)), key=lambda index: (not measured[index].reason, -measured[index].ratio, index))
    num_failed = min(sum(bool(item.reason) for item in measured), keep_failed)
    return [measured[index] for index in sorted(order[: max(keep, num_failed)])]
