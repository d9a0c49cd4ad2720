"""Reports as data: what is written can be read again, is strict, valid by its schema, documented, and whole."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import UsageError
from core.host.selection import select_device
from core_conformance.case import AREAS
from core_conformance.outcome import STATUSES, Measurement, Outcome
from core_conformance.report.report import Report
from core_conformance.report.write import FORMS, check_targets, json_schema, load, to_json_text, write
from core_conformance.runner.environment import environment
from tests.conformance.report.reports_support import ENVIRONMENT, EVERY_STATUS, large, passing, report
from tests.support import refused

Break = Callable[[dict[str, Any]], object]


def strict(text: str) -> dict[str, Any]:
    """Parse JSON as the standard has it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return document


@pytest.mark.parametrize("made", [report(), passing(), large(40, 400), replace(report(()), plugin=None)], ids=range(4))
def test_a_report_survives_its_file(made: Report, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(made, {"--json": path})
    assert load(path) == made
    assert path.read_text(encoding="utf-8") == to_json_text(load(path))
    assert list(tmp_path.iterdir()) == [path]


def test_the_document_says_everything() -> None:
    document = strict(to_json_text(report()))
    assert document["schema"] == "core.conformance/1"
    assert (document["suite"], document["device"]) == ("0.1.0", "acme")
    assert (document["reached"], document["passed"]) == (0, False)
    assert document["counts"] == dict.fromkeys(STATUSES, 1)
    failed = document["cases"][3]
    assert failed["level"] == 1 and failed["worst_ratio"] is None
    assert [item["ratio"] for item in failed["measurements"]] == [3.1, 0.0, None]
    assert failed["repro"] == "core conformance --device acme --case ops/rms_norm/bfloat16/rows-7 --seed 7"


def test_what_is_not_finite_is_null() -> None:
    measured = tuple(Measurement(name="x", criterion="T1", ratio=ratio) for ratio in (0.5, math.nan, 0.7))
    made = report((Outcome(id="fuzz/x", status="fail", measurements=measured),))
    made = replace(made, environment=replace(ENVIRONMENT, capabilities={"extra": {"x": math.inf}}))
    document = strict(to_json_text(made))
    (case,) = document["cases"]
    # Beside 0.5 and 0.7, whose maximum is no summary of what was no number.
    assert case["worst_ratio"] is None
    assert case["level"] is None
    assert document["environment"]["capabilities"]["extra"]["x"] is None


@pytest.mark.parametrize(
    ("outcomes", "passed"),
    [
        ((), False),
        ((Outcome(id="host/x", status="skip"),), False),
        ((Outcome(id="host/x", status="pass"), Outcome(id="host/y", status="xfail")), True),
        ((Outcome(id="host/x", status="pass"), Outcome(id="host/y", status="xpass")), False),
    ],
)
def test_a_run_that_proved_nothing_has_not_passed(outcomes: tuple[Outcome, ...], passed: bool) -> None:
    assert report(outcomes).passed is passed


BREAKS: dict[str, Break] = {
    "$.cases[3].status": lambda d: d["cases"][3].update(status="passed"),
    "$.cases[3].measurements[0].ratio": lambda d: d["cases"][3]["measurements"][0].update(ratio="3"),
    "$.cases[0]": lambda d: d["cases"][0].pop("measurements"),
    "$.cases[0].id": lambda d: d["cases"][0].update(id="unknown/x"),
    "$.elapsed_s": lambda d: d.update(elapsed_s=None),
    "$.reached": lambda d: d.update(reached=4),
    "$.environment.versions.core": lambda d: d["environment"]["versions"].update(core=1),
    "$.counts": lambda d: d["counts"].update(error=1),
    "$.plugin": lambda d: d.update(plugin="acme-device 0.1.0"),
    "$": lambda d: d.pop("obstacles"),
}


@pytest.mark.parametrize("place", BREAKS)
def test_a_broken_document_is_refused_where_it_breaks(place: str, tmp_path: Path) -> None:
    document = strict(to_json_text(report()))
    BREAKS[place](document)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with refused(UsageError, str(path), f"{place}:"):
        load(path)


def test_fields_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    document = strict(to_json_text(report()))
    for item in (document, document["environment"], document["plugin"], document["cases"][3]):
        item["new"] = 1
    document["cases"][3]["measurements"][0]["new"] = 1
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load(path) == report()


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"", "no JSON document"),
        (b"\xff\xfe\x00", "no JSON document"),
        (b"[" * 100_000, "no JSON document"),
        (b"[1]", "its schema is None"),
        (b'{"schema": "core.conformance/2"}', "'core.conformance/2', not 'core.conformance/1'"),
        (b'{"schema": "core.run/1"}', "'core.run/1'"),
        (None, "No such file"),
    ],
)
def test_what_is_no_report_is_refused(content: bytes | None, phrase: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_bytes(content)
    with refused(UsageError, "--from", phrase):
        load(path)
    with refused(UsageError, "--from", "folder" if sys.platform == "win32" else "directory"):
        load(tmp_path)


def test_without_jsonschema_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(report(), {"--json": tmp_path / "results.json"})
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with refused(UsageError, "jsonschema is not installed", "[conformance]'"):
        load(tmp_path / "results.json")


def test_the_schema_knows_the_areas_and_statuses() -> None:
    definitions = json_schema()["$defs"]
    assert definitions["area"]["enum"] == list(AREAS)
    assert definitions["status"]["enum"] == list(STATUSES)
    assert definitions["case"]["properties"]["id"]["pattern"] == f"^({'|'.join(AREAS)})/."


def test_every_field_is_documented_and_in_the_schema() -> None:
    text = (Path(__file__).parents[3] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## core.conformance/1")[2].partition("\n## ")[0]
    document = strict(to_json_text(report()))
    case = document["cases"][3]
    schema = json_schema()
    objects = {"environment": document["environment"], "case": case, "measurement": case["measurements"][0]}
    for name, item in objects.items():
        assert sorted(item) == sorted(schema["$defs"][name]["required"])
        own = section.partition(f"### {name}\n")[2].partition("###")[0]
        assert not [field for field in item if f"`{field}`" not in own]
    # Reports of older suites have no number of ranks.
    assert sorted(document) == sorted([*schema["required"], "ranks"])
    assert not [field for field in document if f"`{field}`" not in section and field not in ("schema", "core")]
    assert not [status for status in STATUSES if f"| `{status}` |" not in section]


@pytest.mark.parametrize(
    ("targets", "phrase"),
    [
        ({"--json": "absent/x.json"}, "there is no folder"),
        ({"--html": "."}, "it is a folder"),
        ({"--html": "-"}, "only --json goes to standard output"),
        ({"--json": "x", "--junit": "./x"}, "--json names the same file"),
        ({"--html": "link", "--badge": "linked"}, "--html names the same file"),
        ({"--badge": "x", "--badge-json": "x"}, "--badge names the same file"),
    ],
)
def test_targets_are_refused_before_a_run(
    targets: dict[str, str], phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    with refused(UsageError, phrase, list(targets)[-1]):
        check_targets({option: Path(path) for option, path in targets.items()})


def test_good_targets_are_accepted(tmp_path: Path) -> None:
    files = {option: tmp_path / option for option in FORMS}
    check_targets({**files, "--json": Path("-"), "--html": None})
    assert not list(tmp_path.iterdir())


def test_a_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write(report(), {"--json": Path("-")})
    assert strict(capsys.readouterr().out)["device"] == "acme"


def test_a_failed_write_leaves_the_old_file_and_the_other_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.html").write_text("old")
    rename = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == "page.html":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", full)
    targets = {"--json": "a.json", "--html": "page.html", "--junit": "a.xml", "--badge": "a.svg", "--badge-json": "b"}
    with refused(UsageError, "--html", "No space left"):
        write(report(), {option: tmp_path / file for option, file in targets.items()})
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg", "a.xml", "b", "page.html"]


def test_what_is_no_plain_file_is_written_in_place() -> None:
    ours, theirs = os.openpty()
    try:
        path = Path(os.ttyname(theirs))
        check_targets({"--badge": path})
        write(passing(), {"--badge": path})
        assert path.is_char_device()
        assert os.read(ours, 65536).startswith(b"<svg")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "latest.json").symlink_to(tmp_path / "run.json")
    write(report(), {"--json": tmp_path / "latest.json"})
    assert (tmp_path / "latest.json").is_symlink()
    assert load(tmp_path / "run.json") == report()


def test_the_environment_of_a_device() -> None:
    device = select_device("cpu")
    extra = {"driver_version": "1.2", "odd": object(), "cores": 4}
    capabilities = replace(device.capabilities, extra=extra)
    found = environment(
        replace(device, parts=replace(device.parts, capabilities=capabilities)), workers=2, threads=3
    ).to_json()
    assert strict(json.dumps(found)) == found
    assert found["capabilities"]["dtypes"] == sorted(found["capabilities"]["dtypes"])
    assert "float32" in found["capabilities"]["dtypes"]
    assert found["capabilities"]["extra"]["odd"].startswith("<object")
    assert "driver_version 1.2" in found["driver"] and "cores" not in found["driver"]
    assert found["versions"].keys() >= {"core", "python", "torch", "transformers", "triton", "numpy"}
    assert (found["workers"], found["threads"]) == (2, 3)


def test_the_environment_names_what_the_plugin_requires() -> None:
    plugin = replace(select_device("cpu").plugin, in_tree=False, distribution="jsonschema")
    versions = environment(None, plugin).versions
    assert versions["attrs"]
    assert environment(None, replace(plugin, distribution="not-installed")).versions.keys() < versions.keys()
    # Of a distribution with several devices, only the extra of this one.
    several = environment(None, replace(plugin, in_tree=True, distribution="core", device="hf")).versions
    assert several["safetensors"] and "rich" not in several


def test_the_environment_of_a_device_that_did_not_open() -> None:
    found = environment()
    assert (found.device_name, found.capabilities) == ("", {})
    assert found.versions["core"]
    made = replace(report(EVERY_STATUS), environment=found)
    assert strict(to_json_text(made))["environment"]["device_name"] == ""
