"""The page of a bench: every figure and check is on it, all of it is text, and no browser cuts a column."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.bench.cells import BenchReport, Cell, CellReport, Record
from core.bench.floor import Floor
from core.bench.plots.page import to_html
from core.bench.rates import Rates
from core.bench.text import COLUMNS
from tests.browser import BROWSER, measured
from tests.page import Page

HOSTILE = "</td><img src=x onerror=alert(1)>"
LONG = "a" * 300


def _record(name: str, ms: float, **changes: Any) -> Record:
    agrees = {"tokens_equal": True, "tokens_compared": 6}
    return replace(Record(subject=name, rounds_ms=[ms, ms * 1.5], verdict=agrees, start_s=2.0), **changes)


def _report(*records: Record, phases: int = 2) -> BenchReport:
    floor = Floor(weight_bytes=1, cache_bytes=1, flops=1, bytes_ms=0.5, flops_ms=0.0)
    cells = tuple(
        CellReport(
            cell=Cell(phase="decode", batch=batch, tokens=8, steps=1, rounds=2), floor=floor, records=records, order=()
        )
        for batch in range(1, phases + 1)
    )
    facts = {
        "model": {"title": HOSTILE, "class": "Llama", "num_parameters": 1e6, "dtype": "float32"},
        "device": {"name": "acme", "product": "Acme A1", "plugin": "acme", "version": "1"},
        "settings": {"rounds": 2, "missing": {"llama.cpp": HOSTILE}},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    }
    rates = Rates(bytes_per_s=4e12, flops_per_s=8e14, copy_bytes=2**30, matmul_size=8192, dtype="bfloat16")
    return BenchReport(facts=facts, rates=rates, cells=cells, references={"engine A": {"decode/1": 1.25}})


def test_the_page_has_each_figure_and_all_that_it_says_is_text() -> None:
    text = to_html(_report(_record("eager", 3.0), _record("core", 1.0), _record("compile", 2.0, failure=HOSTILE)))
    page = Page(text)
    assert HOSTILE not in text and "<script" not in text and "default-src 'none'" in text
    assert "".join(page.texts).count(HOSTILE) >= 4
    rows = re.findall(r'<tr class="(\w+)">(.*?)</tr>', text)
    first = ["floor", "figure", "core", "failed"]  # of the second cell nothing is given
    assert [kind for kind, _ in rows] == [*first, "given", *first]
    assert {row.count("<td>") for _, row in rows} == {len(COLUMNS)}
    assert re.findall(r"<td>(.*?)</td>", rows[2][1]) == ["core", "1.250", "1.000 - 1.500", "", "40%", "3.00x", "2.0"]
    assert "<svg" in text and "interrupted" not in text


def test_what_was_found_stands_before_what_agrees_and_subjects_that_agree_share_a_line() -> None:
    differs = {"tokens_equal": False, "tokens_compared": 6, "mismatch": "sequence 0"}
    records = (_record("eager", 3.0, verdict={}), _record("compile", 2.0), _record("core", 1.0))
    text = to_html(_report(*records, _record("freezing", 2.0, verdict=differs)))
    notes = re.findall(r"<li>(.*?)</li>", text)
    assert notes[:2] == [
        "freezing, decode/1, decode/2: TOKENS DIFFER (sequence 0)",
        "compile, core: 12 tokens equal in 2 cells",
    ]


def test_a_run_that_was_interrupted_says_so_first() -> None:
    report = _report(_record("eager", 3.0))
    text = to_html(replace(report, facts={**report.facts, "interrupted": "not measured: decode/2"}))
    assert re.search(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text).groups() == ("interrupted", "not measured: decode/2")  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(BROWSER) is None, reason=f"needs {BROWSER}")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_browser_cuts_the_figures(width: int, tmp_path: Path) -> None:
    report = _report(_record("eager", 3.0), _record("core", 1.0, notes=[LONG]), _record(LONG, 2.0), phases=12)
    found = measured(to_html(report), width, "", tmp_path)
    assert found == {"width": width, "overflow": 0, "cut": []}
