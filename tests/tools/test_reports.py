"""tools/reports.py: the committed reports are of the suite as it is, or say what they lack, and an old one is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.engine.models.tiny import causal_lm_types
from core.host.selection import select_device
from example_vendor import install
from reports import (
    FOLDER,
    HERE,
    SWEEPS,
    cases_today,
    compare,
    folded,
    page,
    record,
    record_text,
    stale,
    with_missing_types,
)
from tests.installed import NEWEST, skip_where

DEVICES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def read(device: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((FOLDER / f"{device}.json").read_text(encoding="utf-8"))
    return kept


def plant(folder: Path, kept: dict[str, Any], today: list[str]) -> None:
    """Write a record and its page, as they were when this was the suite."""
    (folder / f"{kept['device']}.json").write_text(record_text(kept), encoding="utf-8")
    (folder / f"{kept['device']}.md").write_text(page(kept, compare(kept, today)), encoding="utf-8")


@pytest.mark.cases(2)
@pytest.mark.parametrize("device", DEVICES)
def test_a_committed_report_is_of_the_suite_as_it_is_or_says_what_it_lacks(device: str) -> None:
    assert stale(FOLDER, {device: cases_today(read(device))}) == []


def test_a_device_that_is_stood_in_for_has_no_passes_of_another() -> None:
    own = {each.name for each in select_device("cpu").passes}
    assert own and not own & {case.split("/")[1] for case in cases_today(read("cuda")) if case.startswith("passes/")}


def test_there_is_a_report_of_every_device_of_this_repository() -> None:
    assert set(DEVICES) == {*HERE, "cuda", "npu"}


def test_an_old_report_of_this_machine_is_found(tmp_path: Path) -> None:
    kept = read("cpu")
    today = list(kept["cases"])
    plant(tmp_path, kept, today)
    assert stale(tmp_path, {"cpu": today}) == []
    (added,) = stale(tmp_path, {"cpu": [*today, "ops/new/reference/float32"]})
    assert "lacks ops/new/reference/float32, has none too many; make reports ARGS=cpu" in added
    (removed,) = stale(tmp_path, {"cpu": today[1:]})
    assert f"lacks none, has {today[0]} too many" in removed


def test_an_old_report_of_other_hardware_has_to_say_so(tmp_path: Path) -> None:
    kept = read("cuda")
    today = list(kept["cases"])
    plant(tmp_path, kept, today)
    grown = [*today, "ops/new/reference/float16", "ops/new/reference/float32"]
    (wrong,) = stale(tmp_path, {"cuda": grown})
    assert "docs/conformance/cuda.md does not say what its record does; make reports ARGS=--pages" in wrong
    plant(tmp_path, kept, grown)
    assert stale(tmp_path, {"cuda": grown}) == []
    told = (tmp_path / "cuda.md").read_text(encoding="utf-8")
    assert f"**This run lacks 2 of the {len(grown)} cases" in told and "- `ops/new/reference/{float16,float32}`" in told
    assert "of the suite as it was then" in told


def test_a_page_that_was_changed_by_hand_is_found(tmp_path: Path) -> None:
    kept = read("cpu")
    plant(tmp_path, kept, list(kept["cases"]))
    file = tmp_path / "cpu.md"
    file.write_text(file.read_text(encoding="utf-8").replace("| ops", "| op"), encoding="utf-8")
    assert len(stale(tmp_path, {"cpu": list(kept["cases"])})) == 1


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_page_of_a_sweep_names_the_model_types_that_it_lacks(path: Path) -> None:
    skip_where(not NEWEST, "has fewer model types than the pages say they lack")
    text = path.read_text(encoding="utf-8")
    types = causal_lm_types()
    assert with_missing_types(text, types) == text, "make reports ARGS=--pages"
    grown = with_missing_types(text, [*types, "a_new_type"])
    assert f"of the {len(types) + 1} model types of today: " in grown and "a_new_type" in grown and grown != text
    assert with_missing_types(grown, types) == text
    assert "**Behind**" not in with_missing_types(grown, ["llama"])


def test_a_record_keeps_statuses_reasons_and_worst_ratios() -> None:
    def case(name: str, status: str = "pass", worst: float | None = None, **more: object) -> dict[str, object]:
        return {"id": name, "status": status, "worst_ratio": worst, "reason": "", "excused": False, **more}

    document = dict.fromkeys(("device", "plugin", "environment", "level", "reached", "chosen", "seed", "started"))
    cases = [
        case("ops/a", worst=0.123456),
        case("host/b"),
        case("ops/c", "not-supported", reason="no fp64"),
        case("ops/d", "not-supported", reason="no sinks", excused=True),
    ]
    kept = record({**document, "elapsed_s": 1.5, "cases": cases, "counts": {}})
    expected = {"ops/a": 0.123, "host/b": None, "ops/c": ["not-supported", "no fp64"], "ops/d": ["excused", "no sinks"]}
    assert kept["cases"] == expected
    assert json.loads(record_text(kept)) == kept
    assert '\n  "host/b": null,\n  "ops/a": 0.123,\n' in record_text(kept)


def test_ids_that_differ_in_their_last_part_are_one_line() -> None:
    assert folded(["ops/a/x", "ops/a/y", "host/b"]) == ["ops/a/{x,y}", "host/b"]
