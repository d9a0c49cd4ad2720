"""The section "Beside vLLM": what is planned, how runs join, and every figure comes from the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_beside_vllm import merged, planned

from performance.vllm import beside_vllm

RUN = {
    "started": "2026-11-27T02:00:00+00:00",
    "device": {"product": "A Card"},
    "versions": {"torch": "2.11", "triton": "3.6", "transformers": "5.17"},
}


def cell(batch: int, core: float | None, vllm: float, *, interleaved: bool = True) -> dict[str, Any]:
    def subject(name: str, median: float | None, **more: Any) -> dict[str, Any]:
        ms = None if median is None else {"median": median, "min": median - 0.25, "max": median + 0.25}
        return {"subject": name, "ms": ms, "failure": "" if ms else "ModelError: too little", **more}

    subjects = [
        subject("vllm", vllm, interleaved=interleaved, versions={"vllm": "0.23.0"}),
        subject("core", core, interleaved=True),
    ]
    floor = {"ms": 2.0}
    return {
        "name": f"decode/{batch}",
        "phase": "decode",
        "batch": batch,
        "tokens": 1024,
        "run": RUN,
        "floor": floor,
        "subjects": subjects,
    }


def document(*cells: Any, **more: Any) -> dict[str, Any]:
    model = {"title": "shape, random weights", "num_parameters": 8e9}
    return {"model": model, "settings": {"context": 1024}, "cells": list(cells), **more}


def test_the_section_shows_each_figure_the_lead_and_what_is_missing(tmp_path: Path) -> None:
    first = document(cell(1, 4.0, 5.0), cell(8, None, 6.0), too_large={"decode/256": 90})
    second = document(cell(64, 8.0, 10.0, interleaved=False))
    for name, found in (("a", first), ("b", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    text = beside_vllm(tmp_path)
    assert "A Card, 2026-11-27, torch 2.11, transformers 5.17, triton 3.6, vLLM 0.23.0." in text
    assert "| model | `decode/1` | `decode/8` | `decode/64` | `decode/256` |" in text
    assert "| shape, 8.0 B | 4.00 (3.75 to 4.25) | ModelError | not run | needs 90 GiB |" in text
    assert "| shape, 8.0 B | not run | not run | 10.00 (9.75 to 10.25) † | not run |" in text
    assert "| shape, 8.0 B | 1.250 | - | not run | needs 90 GiB |" in text
    assert "| shape, 8.0 B | 50% | - | not run | needs 90 GiB |" in text


def test_without_documents_there_is_no_section(tmp_path: Path) -> None:
    assert beside_vllm(tmp_path) == ""


def test_batches_run_in_turns_alone_or_not_at_all_by_what_they_need() -> None:
    assert planned({1: 20, 8: 40, 64: 70, 256: 90}, 80) == ([1, 8], [64], {256: 90})


@pytest.mark.parametrize("old", [{}, {"cells": [cell(1, 9.0, 9.0), cell(256, 3.0, 3.0)]}])
def test_a_run_replaces_its_cells_and_keeps_the_others(old: dict[str, Any]) -> None:
    found = merged(old, document(cell(64, 2.0, 2.0), cell(1, 1.0, 1.0)))
    names = ["decode/1", "decode/64"] + (["decode/256"] if old else [])
    assert [each["name"] for each in found["cells"]] == names
    assert found["cells"][0]["subjects"][1]["ms"]["median"] == 1.0
