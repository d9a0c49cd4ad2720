"""The HTML page and what is drawn on it: complete, escaped, self-contained, equal for equal reports, small enough."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from core_conformance.outcome import STATUSES, Measurement, Outcome
from core_conformance.report.html import to_badge, to_badge_json, to_html
from core_conformance.report.ratios import HEADS, RatioCell, RatioRow, ratio_rows
from core_conformance.report.report import Report
from tests import browser
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
    num_failed = sum(bool(item.reason) for outcome in made.outcomes for item in outcome.measurements)
    assert sum(cell.count for row in ratio_rows(made) for cell in row.cells if cell and cell.failed) >= num_failed > 0
    assert "more, none nearer to its bound" in page
    # Where everything fails there is more to say.
    assert len(to_html(large(broken=True)).encode()) < 1_500_000


def test_a_small_report_leaves_nothing_out() -> None:
    page = to_html(large(8, 24))
    assert "none nearer" not in page and "are in the JSON report" not in page


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


def row_of(*ratios: float) -> RatioRow:
    (row,) = ratio_rows(report(tuple(measured(*ratios))))
    return row


def cells(row: RatioRow) -> dict[str, RatioCell]:
    return {head: cell for head, cell in zip(HEADS, row.cells, strict=True) if cell is not None}


def test_values_are_counted_where_their_ratios_are() -> None:
    row = row_of(0.0, 1e-9, 1e-4, 0.01, 0.011, 1.0, 1.01, 100.0, 1e30, math.inf)
    found = cells(row)
    counts = {"0": 1, "≤ 0.0001": 2, "≤ 0.01": 1, "≤ 0.1": 1, "≤ 1": 1, "≤ 2": 1, "≤ 100": 1, "more": 2}
    assert {head: cell.count for head, cell in found.items()} == counts
    assert [head for head, cell in found.items() if cell.failed] == ["≤ 2", "≤ 100", "more"]
    assert (row.worst, row.label, row.num_values) == ("inf", "ops float32", 10)
    assert found["≤ 0.0001"].case == 2 and found["more"].case == 9
    assert found["more"].text == "ops/9: T1 out inf: wrong" and found["0"].share == 10


def test_what_is_no_number_fails() -> None:
    values = tuple(Measurement(name="out", criterion="T1", ratio=ratio) for ratio in (0.5, math.nan))
    (row,) = ratio_rows(report((Outcome(id="ops/x", status="pass", measurements=values),)))
    assert (row.worst, row.label) == ("inf", "ops")
    assert {head: cell.failed for head, cell in cells(row).items()} == {"≤ 0.5": False, "more": True}


def test_a_value_that_fails_below_its_bound_is_told() -> None:
    good = Measurement(name="out", criterion="T1", ratio=0.9)
    bad = replace(good, ratio=0.8, reason="another dtype")
    outcomes = (
        Outcome(id="ops/x", status="pass", measurements=(good,)),
        Outcome(id="ops/y", status="fail", measurements=(bad,)),
    )
    (row,) = ratio_rows(report(outcomes))
    (cell,) = cells(row).values()
    assert cell.failed and cell.case == 1 and cell.count == 2
    page = to_html(report(outcomes))
    assert '<a class="f" href="#c1" title="ops/y: T1 out 0.8: another dtype" style="--share: 100%">2</a>' in page


def test_nothing_measured_is_no_table() -> None:
    assert ratio_rows(passing()) == []
    assert "Error against its bound" not in to_html(passing())


def test_the_badge_says_device_and_level() -> None:
    for made, text in ((passing(), "level 3"), (passing(1), "level 1"), (report(()), "no level reached")):
        badge = to_badge(made)
        assert ElementTree.fromstring(badge).get("aria-label") == f"core conformance 0.1.0, {text}, acme-device 0.1.0"
        assert to_badge(made) == badge
    assert len({re.findall(r'fill="(#\w+)"/', to_badge(made))[1] for made in (passing(), report(), report(()))}) == 3


def test_shields_io_is_told_the_same() -> None:
    """The fields are those of the "endpoint" badge; a key that it does not know is an error there."""
    said = [json.loads(to_badge_json(made)) for made in (passing(), report(), report(()))]
    assert said[0] == {
        "schemaVersion": 1,
        "label": "core conformance 0.1.0",
        "message": "level 3, acme-device 0.1.0",
        "color": "brightgreen",
    }
    assert [each["color"] for each in said[1:]] == ["yellow", "red"]
    assert "\x1b" not in json.loads(to_badge_json(hostile()))["message"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(browser.BROWSER) is None, reason=f"needs {browser.BROWSER}")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_browser_cuts_a_column_and_an_opened_case_says_what_it_shows(width: int, tmp_path: Path) -> None:
    made = large(8, 24)
    made = replace(made, cases={outcome.id: "what it shows" for outcome in made.outcomes})
    opened = """
    for (const box of document.querySelectorAll("details")) box.open = true;
    return {shown: [...document.querySelectorAll(".case > summary > :nth-child(3)")].every(each => each.offsetWidth)};
    """
    found = browser.measured(to_html(made), width, opened, tmp_path)
    assert found == {"width": width, "overflow": 0, "cut": [], "shown": True}
