"""What a terminal and a CI system are shown of a run: levels, numbers, reasons, commands to copy, progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from core_conformance.case import CaseInfo
from core_conformance.outcome import BAD, STATUSES, Outcome
from core_conformance.report.junit import to_junit
from core_conformance.report.overview import (
    CRITERIA,
    STATUS_MEANINGS,
    level_rows,
    plain,
    printable,
    ratio_text,
    seconds_text,
)
from core_conformance.report.report import Report
from core_conformance.report.terminal import to_text
from core_conformance.rules.tolerances import KL_MEAN_FACTOR, T2_FACTOR
from core_conformance.runner.progress import Progress
from tests.conformance.report.reports_support import EVERY_STATUS, large, passing, report
from tests.conformance.report.test_reports_page import HOSTILE, hostile


def test_a_good_run_is_told_in_few_lines() -> None:
    lines = to_text(passing()).splitlines()
    assert "LEVEL 3 OF 3" in lines[2]
    assert len(lines) < 18
    assert "core conformance --device" not in "\n".join(lines)
    assert not {"fail", "skip", "xfail"} & set("\n".join(lines).split())


def test_a_bad_run_says_what_and_how_to_run_it_again() -> None:
    text = to_text(report())
    assert "LEVEL 0 OF 3" in text
    assert "In the way of level 1 (torch" in text and "and 4 more" in text
    for status in STATUSES:
        assert f"1 {status}" in text
    for word in ("CRASH torch/gelu/float32", "FAIL ops/rms_norm/bfloat16/rows-7", "XPASS graphs/replay/one"):
        assert f"\n{word}\n" in text
    assert "\n  core conformance --device acme --case ops/rms_norm/bfloat16/rows-7 --seed 7\n" in text
    for line in ("Declared not supported (1)", "Expected failures (1)", "  known, until 0.2: fakes/rotary"):
        assert line in text
    assert "Traceback" not in text


@pytest.mark.parametrize("made", [report(), large(100, 300), large(50, 50, broken=True), hostile()], ids=range(4))
def test_only_commands_are_wider_than_a_terminal(made: Report) -> None:
    shown = printable(made)
    whole = {f"  {shown.repro(outcome)}" for outcome in shown.outcomes}
    whole |= {f"{outcome.status.upper()} {outcome.id}" for outcome in shown.outcomes}
    assert not {line for line in to_text(made).splitlines() if len(line) > 100} - whole


def test_commands_are_never_broken() -> None:
    made = report((Outcome(id="ops/" + "very-long/" * 20 + "x", status="fail", reason="wrong"),))
    (command,) = [line for line in to_text(made, width=60).splitlines() if line.startswith("  core conformance")]
    assert command.endswith("x --seed 7")


def test_many_failures_are_cut_and_counted() -> None:
    text = to_text(large(100, 100, broken=True))
    assert text.count("\nFAIL ") == 40
    assert "and 60 more that failed" in text


def test_a_run_of_one_case_is_told_in_full() -> None:
    text = to_text(report(EVERY_STATUS[3:4], chosen=("ops/rms*",)))
    assert "NO LEVEL JUDGED" in text and "In the way" not in text
    for line in ("  T1 out: 3.1, 4096 x bfloat16", "  T0 codes: inf, 9 x int8", "  ran on fused_rms_norm"):
        assert f"\n{line}\n" in text
    assert "AssertionError" in text


def test_markup_and_escapes_of_a_vendor_have_no_effect() -> None:
    made = report((Outcome(id="ops/x", status="fail", reason="[red]no[/red] \x1b[2Jgone\x07", detail="[/]"),))
    text = to_text(made)
    assert "[red]no[/red] gone" in text and "[/]" in text
    assert "\x1b" not in to_text(hostile())


def test_a_level_that_was_not_asked_for_stands_in_nobodys_way() -> None:
    made = passing(1)
    assert [row.state for row in level_rows(made)] == ["proven", "proven", "not asked for", "not asked for"]
    assert "In the way" not in to_text(made)
    assert "LEVEL 1 OF 3" in to_text(made)


def test_levels_stand_as_the_run_left_them() -> None:
    assert [(row.state, row.reason) for row in level_rows(report())] == [
        ("proven", ""),
        ("not proven", "7 obstacles"),
        ("not proven", "level 1 comes first"),
        ("not proven", "level 1 comes first"),
    ]
    assert {row.state for row in level_rows(report(chosen=("*",)))} == {"not judged"}
    assert level_rows(report(()))[0].state == "not proven"
    assert set(STATUS_MEANINGS) == set(STATUSES)


def test_times_are_read_easily() -> None:
    texts = {0.0: "0.00 s", 0.5: "0.50 s", 59.9: "59.9 s", 59.96: "1 min 00 s", 119.6: "2 min 00 s"}
    assert {seconds: seconds_text(seconds) for seconds in texts} == texts


def test_ratios_are_read_easily() -> None:
    ratios = (None, 0.0, 0.12345, float("inf"), float("nan"))
    assert [ratio_text(ratio) for ratio in ratios] == ["", "0", "0.123", "inf", "inf"]


def test_the_criteria_are_told_with_the_numbers_in_force() -> None:
    assert f"at most {T2_FACTOR:g} times" in CRITERIA["T2"]
    assert f"at most {KL_MEAN_FACTOR:g} times" in CRITERIA["T3"]


def test_plain_text_keeps_what_can_be_shown() -> None:
    assert plain("a\tb\r\nc\x1b]0;title\x07d\x1b[1;31me\ufffe\U0001f600é") == "a\tb\ncde\U0001f600é"


def suites(made: Report) -> ElementTree.Element:
    return ElementTree.fromstring(to_junit(made).encode("utf-8"))


def test_junit_counts_what_it_holds() -> None:
    root = suites(report())
    numbers = {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "8", "failures": "2", "errors": "2", "skipped": "3"}
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.get("tests", "")) == len(cases) > 0
        for attribute, name in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(attribute, "")) == len(suite.findall(f"testcase/{name}"))
    assert [suite.get("name") for suite in root] == ["host", "torch", "ops", "fakes", "graphs", "models"]


def test_junit_tells_status_reason_and_command() -> None:
    cases = {case.get("name", ""): case for case in suites(report()).iter("testcase")}
    assert list(cases) == [outcome.id for outcome in EVERY_STATUS]
    found = {name: (case[0].tag, case[0].get("message")) for name, case in cases.items()}
    assert found["host/probe"] == ("system-out", None)
    assert found["ops/rotary/float64"] == ("skipped", "not-supported: float64 is not among its dtypes")
    assert found["torch/gelu/float32"] == ("error", "crash: the process died of SIGSEGV")
    failed = cases["ops/rms_norm/bfloat16/rows-7"]
    assert failed.find("failure") is not None and "AssertionError" in (failed.findtext("failure") or "")
    output = failed.findtext("system-out") or ""
    assert "T1 out ratio 3.1: rms" in output and "--case ops/rms_norm/bfloat16/rows-7 --seed 7" in output
    properties = {item.get("name"): item.get("value") for item in suites(report()).iter("property")}
    assert properties["product"] == "Acme One"
    assert properties["version of triton"] == "not installed"


def test_junit_is_xml_whatever_it_holds() -> None:
    assert "alert(1)" in to_junit(hostile())
    (case,) = [case for case in suites(hostile()).iter("testcase") if case.get("name") == "ops/1"]
    assert case.get("classname", "").startswith("conformance.</pre>")
    assert "\x1b" in HOSTILE and "\x1b" not in to_junit(hostile())


def progress_text(*outcomes: Outcome, ids: Sequence[str], terminal: bool = False) -> str:
    """Return what is shown of a run in which these cases were collected and these outcomes came."""
    file = StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with Progress(console=console) as progress:
        progress.collected([CaseInfo(id=id, what="") for id in ids])
        for outcome in outcomes:
            progress.finished(outcome)
    return file.getvalue()


IDS = [outcome.id for outcome in EVERY_STATUS]


def test_progress_is_a_line_per_area_in_any_order() -> None:
    ordered = progress_text(*EVERY_STATUS, ids=IDS).splitlines()
    assert len(ordered) == 6
    assert ordered[2] == "ops: 1 fail, 1 not-supported (1.2 s)"
    assert sorted(progress_text(*reversed(EVERY_STATUS), ids=IDS).splitlines()) == sorted(ordered)


def test_progress_is_told_between_areas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_conformance.runner.progress._SILENCE_S", -1.0)
    bad, good = (next(each for each in EVERY_STATUS if (each.status in BAD) is wrong) for wrong in (True, False))
    came = [replace(good, id="ops/a"), replace(bad, id="ops/b"), replace(good, id="ops/c")]
    told = progress_text(*came, ids=["ops/a", "ops/b", "ops/c", "ops/d"]).splitlines()
    assert told == ["1 of 4 cases done", "2 of 4 cases done, 1 failed", "3 of 4 cases done, 1 failed"]


def test_a_case_that_takes_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file = StringIO()
    with Progress(console=Console(file=file, width=100)) as progress:
        progress.collected([CaseInfo(id="ops/a", what="")])
        progress.waiting("ops/a", 90.0)  # something was told a moment before
        monkeypatch.setattr("core_conformance.runner.progress._SILENCE_S", -1.0)
        progress.waiting("ops/a", 91.0)
    assert file.getvalue() == "0 of 1 cases done; ops/a runs for 1 min 31 s\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    text = progress_text(*EVERY_STATUS, ids=IDS, terminal=True)
    assert "8/8" in text and "4 failed" in text
    assert "not-supported (" not in text


def test_progress_counts_each_case_once() -> None:
    came = [Outcome(id=id, status="pass") for id in ("ops/a", "ops/a", "host/x", "ops/b", "ops/b")]
    assert progress_text(*came, ids=["ops/a", "ops/b"]) == "ops: 2 pass (0.00 s)\n"
    assert "3/2" not in progress_text(*came, ids=["ops/a", "ops/b"], terminal=True)


def test_seed_and_fuzzing_are_part_of_the_command() -> None:
    made = replace(report((Outcome(id="fuzz/x", status="fail"),)), name="acme:1")
    assert "--device acme:1 --case fuzz/x --seed 7 --fuzz 3" in to_text(made)
