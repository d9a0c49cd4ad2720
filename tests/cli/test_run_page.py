"""The timeline of `core run`, its page and its field of the document."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from core.cli.reports import run
from core.cli.reports import timeline as timelines
from core.cli.reports.page import to_html
from core.cli.reports.timeline import RunTimeline, Span
from core.common.graphs.backend import GraphKey
from core.compilation.capture.bucket_report import BucketReport
from core.compilation.report import ProgramReport, TraceReport
from tests.browser import BROWSER, measured
from tests.page import Page

HOSTILE = "</dd><img src=x onerror=alert(1)>"
KEY = GraphKey("decode", (1,), ())
LONG = "a" * 300


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timelines.time, "perf_counter", clock)
    return clock


class Engine:
    """An engine that has run two steps of its own, one of them three times in a row."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @contextmanager
    def timeline(self) -> Iterator[list[tuple[str, int, int, dict[str, Any]]]]:
        noted: list[tuple[str, int, int, dict[str, Any]]] = []
        yield noted
        at, about = int(self._clock.now * 1e9), {"phase": "decode", "tokens": 1, "sequences": 1}
        # The second is begun before the result of the first is there.
        noted.append(("begin", at, at + 2_000_000, about | {"times": 1}))
        noted.append(("begin", at + 2_000_000, at + 3_000_000, about | {"times": 3}))
        noted.append(("wait", at + 3_000_000, at + 4_000_000, about | {"times": 1}))
        noted.append(("wait", at + 5_000_000, at + 9_000_000, about | {"times": 3}))
        self._clock.now += 0.01


def told(clock: Clock) -> RunTimeline:
    """Return the timeline of a start that compiled one bucket."""
    timeline = RunTimeline("importing torch")
    lines: list[tuple[str, int, int]] = []
    tell = timeline.watched(lambda *line: lines.append(line))
    for seconds, line in (
        (3.0, ("making the engine", 0, 0)),
        (1.0, ("trace decode", 0, 1)),
        (10.0, ("capture decode[1]", 0, 1)),
        (5.0, ("capture", 1, 1)),
    ):
        clock.now += seconds
        tell(*line)
    assert [what for what, *_ in lines] == ["making the engine", "trace decode", "capture decode[1]", "capture"]
    clock.now += 0.5
    return timeline


def names(timeline: RunTimeline) -> list[tuple[str, float]]:
    return [(span.name, pytest.approx(span.seconds)) for span in timeline.spans()]


def test_spans_follow_each_other_and_work_goes_on_behind_what_is_counted(clock: Clock) -> None:
    timeline = told(clock)
    assert names(timeline) == [
        ("importing torch", 3.0),
        ("making the engine", 1.0),
        ("trace decode", 10.0),
        ("capture decode[1]", 5.0),
        ("making the engine", 0.5),
    ]
    spans = timeline.spans()
    assert spans[0].start_s == 0.0 and all(a.end_s == b.start_s for a, b in pairwise(spans))


def program(**times: float) -> ProgramReport:
    trace = TraceReport(phase="decode", num_nodes=9, passes=(), ops=(), buckets=(KEY,), **times)
    bucket = BucketReport(key=KEY, lower_s=7.0, capture_s=0.25, num_bytes=0)
    return ProgramReport(
        device="acme",
        plugin="acme 1",
        modes={"decode": "compile"},
        lowering="inline",
        traces=(trace,),
        buckets=(bucket,),
        static_bytes=0,
        total_s=15.0,
    )


def test_graphs_of_one_phase_are_told_apart_by_their_guards() -> None:
    alone = program(trace_s=4.0, passes_s=1.0)
    (trace,) = alone.traces
    ways = [
        replace(trace, buckets=(GraphKey("decode", (1,), (("sampling", way), ("lora", False))),))
        for way in ("greedy", "random")
    ]
    assert run._graph_of(trace, alone) == "decode"
    both = replace(alone, traces=(*ways, replace(trace, phase="prefill")))
    assert [run._graph_of(each, both) for each in both.traces] == [
        *(f"decode (sampling={way}, lora=False)" for way in ("greedy", "random")),
        "prefill",
    ]


def test_the_start_is_itemised_by_what_the_program_says_that_it_took(clock: Clock) -> None:
    timeline = told(clock)
    timeline.itemise(program(trace_s=4.0, passes_s=1.0, choose_s=3.0))
    assert names(timeline)[2:7] == [
        ("tracing decode", 4.0),
        ("passes on decode", 1.0),
        ("choosing and building kernels of decode", 3.0),
        ("preparing decode", 2.0),
        ("lowering decode[1]", 4.75),
    ]
    assert names(timeline)[7] == ("capturing decode[1]", 0.25)


def test_no_itemised_part_is_longer_than_what_it_is_a_part_of(clock: Clock) -> None:
    timeline = told(clock)
    timeline.itemise(program(trace_s=9.0, passes_s=9.0, choose_s=9.0))
    assert names(timeline)[2:4] == [("tracing decode", 9.0), ("passes on decode", 1.0)]
    assert timeline.spans()[-1].end_s == pytest.approx(19.5)


def test_the_row_of_the_start_names_the_kernels_and_what_is_left(clock: Clock) -> None:
    text = program(trace_s=4.0, passes_s=1.0, choose_s=3.0).time_text(16.0)
    assert text.startswith("16.0 s: lowering 7.0, tracing 4.0, choosing and building kernels 3.0, passes 1.0")


def test_a_step_that_is_begun_ahead_keeps_its_own_wait(clock: Clock) -> None:
    timeline = told(clock)
    with timeline.generating(Engine(clock)):  # type: ignore[arg-type]
        pass
    first, second = timeline.steps
    assert (first.times, second.times) == (1, 3)
    assert first.end_s - first.start_s == pytest.approx(0.004)
    assert (second.begin_s, second.end_s - second.wait_start_s) == pytest.approx((0.001, 0.004))
    document = json.loads(json.dumps(timeline.to_json()))
    assert [each["name"] for each in document["phases"]][-1] == "generating"
    assert document["steps"][1]["times"] == 3


def test_the_page_needs_nothing_else_and_all_that_it_says_is_text(clock: Clock) -> None:
    timeline = told(clock)
    with timeline.generating(Engine(clock)):  # type: ignore[arg-type]
        pass
    timeline.mark(HOSTILE)
    clock.now += 2
    text = to_html(HOSTILE, [(HOSTILE, HOSTILE)], timeline)
    page = Page(text)
    assert HOSTILE not in text and "".join(page.texts).count(HOSTILE) == 5
    assert "<script" not in text and "default-src 'none'" in text
    assert re.findall(r'class="name">([^<]*)</span>', text)[-2:] == [
        "1  decode, 1 token",
        "2  decode, 1 token, 3 times",
    ]
    ends = [float(left) + float(width) for left, width in re.findall(r"left: ([\d.]+)%; width: ([\d.]+)%", text)]
    assert ends and max(ends) <= 100.2


def test_brief_phases_share_a_row_and_many_steps_are_summed_up(clock: Clock) -> None:
    timeline = RunTimeline("one")
    for name in ("two", "three"):
        clock.now += 0.01
        timeline.mark(name)
    clock.now += 1
    for _ in range(20):
        with timeline.generating(Engine(clock)):  # type: ignore[arg-type]
            pass
    text = to_html("a", [], timeline)
    assert ">one, two<" in text and "24 of 40 steps" in text and "16 more, in" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(BROWSER) is None, reason=f"needs {BROWSER}")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_browser_cuts_what_the_page_says(width: int, clock: Clock, tmp_path: Path) -> None:
    timeline = told(clock)
    with timeline.generating(Engine(clock)):  # type: ignore[arg-type]
        pass
    timeline._spans.append(Span(LONG, 1.0, 2.0))
    found = measured(to_html(LONG, [("model", LONG)], timeline), width, "", tmp_path)
    assert found == {"width": width, "overflow": 0, "cut": []}


@pytest.mark.slow
def test_a_run_writes_its_page_and_its_document_has_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.cli import main

    page = tmp_path / "run.html"
    assert main(["run", "--device", "cpu", "--lowering", "inline", "--html", str(page), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["html"] == str(page)
    phases = [each["name"] for each in document["timeline"]["phases"]]
    assert phases[0] == "importing torch" and phases[-2:] == ["generating", "comparing with the eager model"]
    assert {"tracing decode", "passes on decode"} <= set(phases)
    assert document["timeline"]["steps"][0]["phase"] == "prefill"
    assert sum(each["times"] for each in document["timeline"]["steps"] if each["phase"] == "decode") >= (
        len(document["completions"][0]["token_ids"]) - 1
    )
    texts = "".join(Page(page.read_text(encoding="utf-8")).texts)
    assert "tracing decode" in texts and "The first steps" in texts and "max logits error" in texts


def test_a_page_that_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    from core.cli import main

    assert main(["run", "--html", "/nowhere/page.html"]) == 2
    assert "there is no folder '/nowhere'" in capsys.readouterr().err
