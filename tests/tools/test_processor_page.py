"""The section "Processor": every figure comes from the documents, and load is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from performance.processor import processor
from processor_bench import RUNS, planned


def subject(name: str, median: float | None, failure: str = "", check: Any = None, **more: Any) -> dict[str, Any]:
    ms = None if median is None else {"median": median, "min": median - 1, "max": median + 1}
    return {"subject": name, "ms": ms, "failure": failure, "check": check, **more}


def document(threads: int, load: float) -> dict[str, Any]:
    agree = {"against": "core", "tokens_agreeing": 17, "tokens_compared": 18}
    subjects = [
        subject("core", 4.0, check={"against": "eager", "tokens_agreeing": 18, "tokens_compared": 18}),
        subject("fast", 5.0, check=agree, versions={"fast": "1.2"}),
        subject("wrong", 3.0, "computes something else: token 7; that is all"),
        subject("none", None, "ModelError: no bf16; leave it out"),
    ]
    return {
        "name": "small",
        "context": 128,
        "load_before": load,
        "started": "2026-11-23T10:00:00+00:00",
        "device": {"product": "A Processor"},
        "versions": {"torch": "2.13", "transformers": "5.23"},
        "model": {"dtype": "bfloat16"},
        "settings": {"threads": threads, "rounds": 11, "steps": 16, "missing": {"absent": "not installed; pip it"}},
        "rates": {"reads": {"1": 2e10, str(threads): 3e10}},
        "cells": [{"batch": 4, "floor": {"ms": 2.0}, "subjects": subjects}],
    }


def test_the_section_shows_each_figure_its_share_and_what_failed(tmp_path: Path) -> None:
    assert processor(tmp_path) == ""
    (tmp_path / "small-c128-t2.json").write_text(json.dumps(document(2, 0.1)))
    text = processor(tmp_path)
    assert "### 2 threads" in text and "30.0 to 30.0 GB/s" in text and "fast 1.2" in text and "load" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| small")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["small, bfloat16, context 128", "4", "2.00"]
    assert cells[3:5] == ["4.00 (3.00 to 5.00) [50%]", "5.00 (4.00 to 6.00) [40%; 17/18]"]
    assert cells[5:] == ["computes something else: token 7", "ModelError: no bf16"]
    assert "- Not measured: `absent`: not installed; pip it." in text


def test_a_peer_of_another_environment_has_versions_of_its_own(tmp_path: Path) -> None:
    measured = document(2, 0.1)
    shared = {"torch": "2.13", "transformers": "5.23", "fast": "1.2"}
    other = subject("other", 4.0, versions={"torch": "2.8", "transformers": "4.51", "old": "2.8"})
    measured["cells"][0]["subjects"] += [subject("third", 4.0, versions=shared), other]
    (tmp_path / "small-c128-t2.json").write_text(json.dumps(measured))
    assert (
        "A Processor; torch 2.13, transformers 5.23, fast 1.2; `other`: torch 2.8, transformers 4.51, old 2.8.\n"
    ) in processor(tmp_path)


def test_load_beside_the_runs_is_said(tmp_path: Path) -> None:
    for threads, load in ((1, 0.2), (2, 3.5)):
        (tmp_path / f"small-c128-t{threads}.json").write_text(json.dumps(document(threads, load)))
    text = processor(tmp_path)
    assert "**Measured under load, not final**" in text and "0.2 to 3.5" in text
    assert text.index("### 1 thread\n") < text.index("### 2 threads")


def test_the_plan_has_each_run_once_with_each_number_of_threads(tmp_path: Path) -> None:
    names = [path.name for _, _, path in planned(tmp_path, [1, 2])]
    assert len(set(names)) == len(names) == 2 * len(RUNS)
    assert "llama-100m-c2048-t1.json" in names and "embedded-c128-t2.json" in names
