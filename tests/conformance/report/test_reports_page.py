"""The HTML page and what is drawn on it: complete, escaped, self-contained, equal for equal reports, small enough."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from core_conformance.outcome import STATUSES, Measurement, Outcome
from core_conformance.report.html import to_badge, to_html
from core_conformance.report.plots import RatioPlot, ratio_plot
from core_conformance.report.report import Report
from tests.conformance.report.reports_support import ENVIRONMENT, EVERY_STATUS, PLUGIN, large, passing, report

HOSTILE = '</pre></title><script>alert(1)</script>" onclick="x \x1b[31mred\x07 \ud800 \x00'
VOID = {"meta", "input", "br"}


class Nesting(HTMLParser):
    """Follows the tags of a page; what is closed out of order is a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mistakes: list[str] = []
        self.num_tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.num_tags[tag] = self.num_tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.num_tags[tag] = self.num_tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(f"</{tag}> at {self.getpos()}")


def read(page: str) -> Nesting:
    parser = Nesting()
    parser.feed(page)
    parser.close()
    assert not parser.mistakes and not parser.open
    return parser


def hostile() -> Report:
    """Return a report whose every text tries to leave its place."""
    measured = Measurement(name=HOSTILE, criterion="T1", ratio=2.0, reason=HOSTILE, dtype="float32", num_elements=8)
    outcomes = tuple(
        Outcome(id=f"ops/{number}", status=status, reason=HOSTILE, detail=HOSTILE, notes=(HOSTILE,))
        for number, status in enumerate(STATUSES)
    )
    outcomes += (Outcome(id=f"ops/{HOSTILE}", status="fail", measurements=(measured,)),)
    environment = replace(
        ENVIRONMENT,
        device_name=HOSTILE,
        driver=HOSTILE,
        platform=HOSTILE,
        versions={"core": HOSTILE, HOSTILE: HOSTILE},
        capabilities={HOSTILE: HOSTILE, "dtypes": [HOSTILE], "extra": {HOSTILE: HOSTILE}},
    )
    plugin = replace(PLUGIN, version=HOSTILE, entry_point=HOSTILE, requires_core=HOSTILE)
    made = report(outcomes, chosen=(HOSTILE,))
    return replace(made, name=HOSTILE, plugin=plugin, environment=environment, obstacles=(HOSTILE,), started=HOSTILE)


@pytest.mark.parametrize("made", [report(), passing(), passing(1), large(60, 900), report(())], ids=range(5))
def test_a_page_is_well_formed_and_loads_nothing(made: Report) -> None:
    page = to_html(made)
    tags = read(page)
    assert page.lstrip().startswith("<!DOCTYPE html>")
    assert tags.num_tags["script"] == tags.num_tags["style"] == 1
    assert tags.num_tags.get("details", 0) >= len(made.outcomes)
    assert not re.search(r"https?:|src=|@import|url\(|<link|<img", page)
    assert to_html(Report.from_json(made.to_json())) == page


def test_a_page_says_what_became_of_every_case() -> None:
    page = to_html(report())
    for outcome in EVERY_STATUS:
        assert f">{outcome.id}<" in page
        assert f'data-s="{outcome.status}"' in page
        assert report().repro(outcome) in page
    for text in ("level 0 of 3", "Acme One", "acme-device 0.1.0", "float64 is not among its dtypes", "SIGSEGV"):
        assert text in page
    assert "ran on fused_rms_norm" in page and "slower here" in page


def test_no_text_leaves_its_place() -> None:
    page = to_html(hostile())
    tags = read(page)
    assert tags.num_tags["script"] == 1
    assert "alert(1)" in page and "<script>alert" not in page and 'onclick="' not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", page)
    ElementTree.fromstring(to_badge(hostile()))


def test_a_large_report_stays_a_page() -> None:
    made = large()
    page = to_html(made)
    assert len(page.encode()) < 1_000_000
    plot = ratio_plot(made)
    assert plot is not None and plot.num_shown < plot.num_values
    assert f"Drawn: {plot.num_shown} of {plot.num_values} values" in page
    num_failed = sum(bool(item.reason) for outcome in made.outcomes for item in outcome.measurements)
    assert page.count('<circle class="f"') == num_failed > 0
    assert "more, none nearer to its bound" in page
    # Where everything fails there is more to say.
    assert len(to_html(large(broken=True)).encode()) < 1_500_000


def test_a_small_report_leaves_nothing_out() -> None:
    page = to_html(large(8, 24))
    assert "Drawn: " not in page and "none nearer" not in page and "are in the JSON report" not in page


def test_the_end_of_a_long_traceback_is_kept() -> None:
    detail = "\n".join(f"line {number}" for number in range(100_000))
    page = to_html(report((Outcome(id="ops/x", status="fail", detail=detail),)))
    assert "line 99999" in page and "line 17\n" not in page
    assert "are in the JSON report" in page


def measured(*ratios: float) -> Iterator[Outcome]:
    for number, ratio in enumerate(ratios):
        reason = "" if ratio <= 1 else "wrong"
        item = Measurement(name="out", criterion="T1", ratio=ratio, reason=reason, dtype="float32", num_elements=512)
        yield Outcome(id=f"ops/{number}", status="fail" if reason else "pass", measurements=(item,))


def plot_of(*ratios: float) -> RatioPlot:
    plot = ratio_plot(report(tuple(measured(*ratios))))
    assert plot is not None
    return plot


def test_dots_stand_where_their_ratios_are() -> None:
    plot = plot_of(0.0, 1e-9, 0.01, 0.1, 1.0, 1.01, 100.0, 1e30, math.inf)
    (row,) = plot.rows
    by_case = {dot.case: dot for dot in row.dots}
    places = [by_case[number].x for number in range(9)]
    assert places == sorted(places)
    assert len(set(places)) == 9
    assert by_case[4].x == plot.bound < by_case[5].x
    assert [by_case[number].failed for number in range(9)] == [False] * 5 + [True] * 4
    assert plot.left < places[0] and places[-1] < plot.right
    assert [label for _, label in plot.ticks][:2] == ["0", "≤ 0.0001"]
    assert [label for _, label in plot.ticks][-2:] == ["≥ 1000000", "∞"]
    assert (row.worst, row.label) == ("inf", "ops float32")


def test_what_is_no_number_fails() -> None:
    values = tuple(Measurement(name="out", criterion="T1", ratio=ratio) for ratio in (0.5, math.nan))
    plot = ratio_plot(report((Outcome(id="ops/x", status="pass", measurements=values),)))
    assert plot is not None
    (row,) = plot.rows
    assert (row.failed, row.worst, row.label) == (True, "inf", "ops")
    assert [dot.failed for dot in row.dots] == [True, False]


def test_the_axis_ends_with_what_there_is() -> None:
    assert [label for _, label in plot_of(0.5).ticks][-2:] == ["1", "10"]
    assert plot_of(0.0).num_shown == 1


def test_the_worst_is_never_left_out() -> None:
    ratios = [0.9 + number * 1e-6 for number in range(5000)]
    plot = plot_of(*ratios)
    (row,) = plot.rows
    assert plot.num_shown < 20 and plot.num_values == 5000
    assert 4999 in {dot.case for dot in row.dots}
    assert not {dot.y for dot in row.dots if not plot.top < dot.y < plot.bottom}


def test_nothing_measured_is_no_plot() -> None:
    assert ratio_plot(passing()) is None
    assert "Error against its bound" not in to_html(passing())


def test_the_badge_says_device_and_level() -> None:
    for made, text in ((passing(), "level 3"), (passing(1), "level 1"), (report(()), "no level reached")):
        badge = to_badge(made)
        assert ElementTree.fromstring(badge).get("aria-label") == f"core conformance 0.1.0, {text}, acme-device 0.1.0"
        assert to_badge(made) == badge
    assert len({re.findall(r'fill="(#\w+)"/', to_badge(made))[1] for made in (passing(), report(), report(()))}) == 3
