"""The plot: one XML document with every label, floors where they belong, and each file that can't be drawn refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from core.bench.cells import BenchReport, Cell, CellReport, Record
from core.bench.floor import Floor
from core.bench.plots.figures import Panel, panels
from core.bench.plots.file import check_plot, write_plot
from core.bench.plots.svg import to_svg
from core.bench.rates import Rates
from core.errors import UsageError
from tests.support import refused

SVG = "{http://www.w3.org/2000/svg}"
RATES = Rates(bytes_per_s=4e12, flops_per_s=8e14, copy_bytes=2**30, matmul_size=8192, dtype="bfloat16")


def _cell(cell: Cell, figures: dict[str, float | None], floor: float) -> CellReport:
    records = []
    for name, ms in figures.items():
        record = Record(subject=name, failure="" if ms else "OutOfMemoryError: x")
        record.rounds_ms = [ms * 0.9, ms, ms * 1.2] if ms else []
        record.replay_ms = [ms * 0.8] if ms and name == "core" else []
        records.append(record)
    return CellReport(
        cell=cell,
        floor=Floor(weight_bytes=1, cache_bytes=1, flops=1, bytes_ms=floor, flops_ms=0.0),
        records=tuple(records),
        order=(),
    )


def _report(**changes: Any) -> BenchReport:
    decode: dict[str, Any] = {"phase": "decode", "tokens": 1024, "steps": 8, "rounds": 3}
    cells = (
        _cell(Cell(batch=1, **decode), {"eager": 21.0, "max-autotune": None, "core": 4.3}, 3.8),
        _cell(Cell(batch=64, **decode), {"eager": 24.0, "max-autotune": 9.9, "core": 7.1}, 5.9),
        _cell(Cell(phase="prefill", batch=1, tokens=128, steps=1, rounds=3), {"eager": 500.0, "core": 5.0}, 4.0),
    )
    facts = {
        "model": {"title": "a <model> & more", "dtype": "bfloat16"},
        "device": {"product": "Acme A1"},
        "settings": {"rounds": 3},
        "versions": {"torch": "2.11.0"},
    }
    fields: dict[str, Any] = {"facts": facts, "rates": RATES, "cells": cells} | changes
    return BenchReport(**fields)


def test_the_svg_is_xml_with_every_label_and_bar() -> None:
    report = _report(references={'engine "A" <b>': {"decode/1": 4.93}, "unused": {"decode/7": 1.0}})
    root = ElementTree.fromstring(to_svg(report))
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    for label in ("eager", "max-autotune", "core", 'engine "A" <b>', "floor", "captured graph alone"):
        assert label in texts
    for label in ("batch 1", "batch 64", "128 tokens", "21", "4.3", "9.9", "4.93", "floor 3.8 ms"):
        assert label in texts
    assert any("a <model> & more, bfloat16, on Acme A1" in text for text in texts)
    assert "max-autotune: failed" in texts and "unused" not in texts
    tips = [element.text for element in root.iter(f"{SVG}title")]
    assert "core: 4.3 ms (3.87 to 5.16), floor 3.8" in tips
    # A bar for each figure, and a mark for each name in the legend.
    assert len(list(root.iter(f"{SVG}rect"))) == 8 + 4


def test_heights_and_the_floor_are_to_scale() -> None:
    report = _report()
    root = ElementTree.fromstring(to_svg(report))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    eager, core = (float(bar.attrib["height"]) for bar in bars[:2])
    assert eager / core == pytest.approx(21 / 4.3, rel=0.01)  # the decode panel is linear from 0
    bottom = float(bars[0].attrib["y"]) + eager
    floors = [line for line in root.iter(f"{SVG}line") if line.find(f"{SVG}title") is not None]
    assert (bottom - float(floors[0].attrib["y1"])) / eager == pytest.approx(3.8 / 21, rel=0.01)


def test_the_axis_is_logarithmic_only_where_figures_are_far_apart() -> None:
    decode, prefill = panels(_report())
    assert (decode.is_log, prefill.is_log) == (False, True)
    assert "Prefill: ms to the first token (logarithmic)" in to_svg(_report())
    assert decode.names == ("eager", "max-autotune", "core")
    assert isinstance(decode, Panel) and decode.ends == (3.8, 24.0 * 1.2)


def test_a_run_in_which_all_failed_still_draws() -> None:
    cell = _cell(Cell(phase="decode", batch=1, tokens=8, steps=1, rounds=1), {"eager": None}, 1.0)
    assert ElementTree.fromstring(to_svg(_report(cells=(cell,)))).tag == f"{SVG}svg"


def test_files_that_cannot_be_drawn_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UsageError, "--plot", ".pdf", ".svg, .png"):
        check_plot(tmp_path / "x.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(UsageError, "matplotlib", "name a .svg"):
        check_plot(tmp_path / "x.png")
    check_plot(None)
    write_plot(_report(), tmp_path / "x.svg")
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag == f"{SVG}svg"
