"""core_conformance/rules/expectations.py, runner/selection.py: expected failures, declared limits, wrong files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.device import PluginInfo
from core.errors import UsageError
from core_conformance.case import CaseInfo
from core_conformance.outcome import Outcome, Status
from core_conformance.rules.expectations import Expectation, Expectations
from core_conformance.runner.protocol import Collected
from core_conformance.runner.selection import Rules
from tests.support import refused

GOOD = """
schema = "core.xfail/1"

[[expected]]
case = "ops/attention/*"
reason = "rows beyond the window are read"
until = "1.4"
issue = "https://acme.example/7"

[[expected]]
case = "ops/norm/float16"
reason = "flushes denormals"
until = "2"
"""
PLUGIN = PluginInfo(device="acme", distribution="acme-device", version="1.3.9", entry_point="acme")
IDS = ("host/profile", "ops/attention/paged", "ops/attention/dense", "ops/norm/float16", "ops/norm/bfloat16")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "xfail.toml"


def load(path: Path, text: str = GOOD) -> Expectations:
    path.write_text(text, encoding="utf-8")
    return Expectations.load(path)


def outcome(status: Status = "fail", id: str = "ops/attention/paged", reason: str = "rms 3.2 over 1") -> Outcome:
    return Outcome(id=id, status=status, reason="" if status == "pass" else reason, detail="a traceback")


def test_a_file_is_read(path: Path) -> None:
    first, second = load(path).entries
    assert first.reason == "rows beyond the window are read" and first.issue == "https://acme.example/7"
    assert second == Expectation(case="ops/norm/float16", reason="flushes denormals", until="2")
    load(path).check(IDS)
    assert load(path, 'schema = "core.xfail/1"').entries == ()


@pytest.mark.parametrize("status", ["fail", "crash", "timeout"])
def test_a_listed_failure_is_expected_and_keeps_its_reason(path: Path, status: Status) -> None:
    judged = load(path).judge(outcome(status), "1.3.9")
    assert (judged.status, judged.detail) == ("xfail", "a traceback")
    expected = "expected until version 1.4: rows beyond the window are read (https://acme.example/7)"
    assert judged.reason == f"{expected}; found: rms 3.2 over 1"


def test_a_listed_case_that_passes_is_bad(path: Path) -> None:
    judged = load(path).judge(outcome("pass"), "1.3.9")
    assert judged.status == "xpass"
    assert "xfail.toml" in judged.reason and "remove the entry 'ops/attention/*'" in judged.reason
    assert load(path).judge(outcome("pass"), "1.5").status == "xpass", "an entry that is of no use any more must go"


@pytest.mark.parametrize("version", ["1.4", "1.4.0", "1.10", "2.0rc1"])
def test_an_expired_entry_excuses_nothing(path: Path, version: str) -> None:
    judged = load(path).judge(outcome("crash"), version)
    assert judged.status == "crash"
    assert judged.reason == (f"rms 3.2 over 1 (expected to fail until version 1.4 of the plugin, which is {version})")


@pytest.mark.parametrize("version", ["1.3.9", "1.4rc1", "1.4.dev3", "0", "(no version)", ""])
def test_an_entry_holds_before_its_version(path: Path, version: str) -> None:
    assert load(path).judge(outcome(), version).status == "xfail"


@pytest.mark.parametrize(
    "given",
    [
        outcome("not-supported"),
        outcome("skip"),
        outcome("fail", "ops/norm/bfloat16"),
        outcome("pass", "ops/norm/bfloat16"),
        outcome("fail", "OPS/attention/paged"),
    ],
)
def test_other_outcomes_stay_as_they_are(path: Path, given: Outcome) -> None:
    assert load(path).judge(given, "1.0") == given


def test_of_several_entries_one_that_holds_counts(path: Path) -> None:
    late = '\n[[expected]]\ncase = "ops/*"\nreason = "all of them"\nuntil = "9"\n'
    assert load(path, GOOD + late).judge(outcome(), "1.5").reason.startswith("expected until version 9: all of them; ")


def test_an_id_with_brackets_is_taken_as_it_is() -> None:
    entries = (Expectation(case="ops/a[1]", reason="r", until="2"),)
    assert Expectations(entries=entries).judge(outcome(id="ops/a[1]"), "1").status == "xfail"


def entry(**fields: str) -> str:
    values = {"case": '"ops/norm/*"', "reason": '"r"', "until": '"1.4"', **fields}
    lines = [f"{name} = {value}" for name, value in values.items() if value]
    return "\n".join(['schema = "core.xfail/1"', "[[expected]]", *lines])


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("a = 1\nschema == 'x'\n", ["not valid TOML", "line 2"]),
        ("", ["states no schema", 'begin it with schema = "core.xfail/1"']),
        ('schema = "core.xfail/2"', ["its schema is 'core.xfail/2'"]),
        ('schema = "core.xfail/1"\n[[expcted]]\n', ["unknown keys: expcted", "did you mean 'expected'?"]),
        ('schema = "core.xfail/1"\nexpected = 3', ["no list of tables"]),
        ('schema = "core.xfail/1"\n[expected]\ncase = "a"', ["no list of tables", "[[expected]]"]),
        ('schema = "core.xfail/1"\nexpected = [3]', ["no list of tables"]),
        (entry(reason=""), ["entry 1 ('ops/norm/*') has no 'reason'", 'add reason = "…"']),
        (entry(until=""), ["entry 1 ('ops/norm/*') has no 'until'"]),
        (entry(case=""), ["entry 1 has no 'case'"]),
        (entry(reason='" "'), ["reason = ' ', which is no text"]),
        (entry(until="1.4"), ["until = 1.4, which is no text", 'write until = "…"']),
        (entry(until='"soon"'), ["until = 'soon', which is no version"]),
        (entry(case="[1]"), ["entry 1 has case = [1], which is no text"]),
        (entry(issu='"x"'), ["unknown key 'issu'", "did you mean 'issue'?", "case, reason, until, issue"]),
        (f"{GOOD}[[expected]]\ncase = 'ops/x'", ["entry 3 ('ops/x') has no 'reason'"]),
    ],
)
def test_a_wrong_file_is_refused(path: Path, text: str, phrases: list[str]) -> None:
    with refused(UsageError, "expected failures in '", "xfail.toml", *phrases):
        load(path, text)


def test_a_file_that_cannot_be_read_is_refused(path: Path, tmp_path: Path) -> None:
    with refused(UsageError, "it cannot be read: No such file or directory"):
        Expectations.load(path)
    with refused(UsageError, "it cannot be read: Is a directory"):
        Expectations.load(tmp_path)
    path.write_bytes(b"schema = '\xff'")
    with refused(UsageError, "not valid TOML"):
        Expectations.load(path)


def collected(**fields: Any) -> Collected:
    cases = tuple(CaseInfo(id=id, what="") for id in IDS)
    return replace(Collected(cases=cases, name="acme", plugin=PLUGIN), **fields)


def test_an_entry_without_a_case_is_refused(path: Path) -> None:
    expectations = load(path, entry(case='"ops/attention/pagd"'))
    with refused(UsageError, "xfail.toml", "entry 1 names case 'ops/attention/pagd'", "'ops/attention/paged'"):
        Rules(collected(), expectations)
    # Where a device did not open, nobody knows the cases.
    Rules(collected(error={"found": "asleep"}, cases=()), expectations)


def test_declared_limits_come_before_expected_failures(path: Path) -> None:
    limits = {"ops/attention/*": "no paged cache", "ops/norm/bfloat16": "", "*": "nothing works"}
    cases = {case.id: case for case in collected().cases}
    rules = Rules(collected(not_supported=limits), load(path))
    reasons = {id: outcome.reason for id, case in cases.items() if (outcome := rules.declared(case)) is not None}
    assert reasons == {
        "ops/attention/paged": "no paged cache",
        "ops/attention/dense": "no paged cache",
        "ops/norm/float16": "nothing works",
        "ops/norm/bfloat16": "declared without a reason",
    }
    own = replace(cases["ops/norm/float16"], not_supported="no such dtype")
    declared = rules.declared(own)
    assert declared is not None and (declared.status, declared.reason) == ("not-supported", "no such dtype")
    assert rules.judge(declared) == declared


def test_the_version_is_the_plugins(path: Path) -> None:
    assert Rules(collected(), load(path)).judge(outcome()).status == "xfail"
    newer = collected(plugin=replace(PLUGIN, version="1.4"))
    assert Rules(newer, load(path)).judge(outcome()).status == "fail"
    assert Rules(collected(plugin=None), load(path)).judge(outcome()).status == "xfail"
