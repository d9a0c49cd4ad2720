"""tools/performance_page.py: every figure of the page comes from the files it is given."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/performance_page.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("performance_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def subject(name: str, median: float | None, failure: str = "", **more: Any) -> dict[str, Any]:
    found = None if median is None else {"median": median, "min": median - 0.5, "max": median + 0.5}
    return {"subject": name, "ms": found, "replay_ms": None, "failure": failure, "check": None, **more}


def timed(others: dict[str, float]) -> dict[str, Any]:
    line = {"op": "norm", "size": "1 x 4096", "core_us": 2.5, "floor_us": 0.1, **others}
    return {"bandwidth": 4.2e12, "lines": [line]}


def bench() -> dict[str, Any]:
    logits = {"passed": True, "reference": "fp64 on the host"}
    replay = {"median": 1.25, "min": 1.0, "max": 1.5}
    node = {"op": "core::linear", "implementation": "some_linear", "us": 20.0, "share": 0.5, "floor_us": 15.0}
    kernels = [{"name": "tile", "count": 2, "us": 20.0}]
    layer = {"name": "model.layers.0-31", "count": 32, "us": 40.0, "floor_us": 30.0}
    return {
        "model": {"title": "a model", "class": "A", "num_parameters": 8e9, "dtype": "bfloat16", "attention": "sdpa"},
        "settings": {"context": 1024},
        "device": {"product": "a card"},
        "versions": {"torch": "2.0", "numpy": None},
        "rates": {"bytes_per_s": 4.2e12, "flops_per_s": 790e12},
        "started": "2026-11-21T10:00:00",
        "references": {"another engine": {"decode/1": 4.93}},
        "cells": [
            {
                "name": "decode/1",
                "floor": {"ms": 3.55},
                "subjects": [
                    subject("eager", None, failure="OutOfMemoryError: too little"),
                    subject("core", 4.5, check={"tokens_equal": True, "logits": logits}) | {"replay_ms": replay},
                ],
                "kernels": {"layers": [{**layer, "nodes": [{**node, "kernels": kernels}]}]},
            }
        ],
    }


def test_figures_and_failures_stand_on_the_page(script: Any, tmp_path: Path) -> None:
    (tmp_path / "bench-a.json").write_text(json.dumps(bench()))
    (tmp_path / "notes.md").write_text("What was measured.\n")
    line = {"step_ms": 5.0, "cell": "decode/1"}
    lines = [
        {**line, "variant": "all passes", "replay_ms": 4.0, "matched": {"fuse": 32}},
        {**line, "variant": "without fuse", "replay_ms": 4.75, "matched": {}},
    ]
    (tmp_path / "gains-a.json").write_text(json.dumps({"preset": "a", "lines": lines}))
    (tmp_path / "kernels.json").write_text(json.dumps(timed({"torch_us": 7.5})))
    page = script.page(tmp_path)
    for text in (
        "What was measured.",
        "| `eager` | OutOfMemoryError |",
        "| `core` | 4.50 (4.00 to 5.00) |",
        "| `core`, the graph alone | 1.25 (1.00 to 1.50) |",
        "| another engine | 4.93 |",
        "| floor | 3.55 |",
        "| floor over `core` | 79% |",
        "transformers uses its attention `sdpa`.",
        "Others' figures were given to the run, not measured in it.",
        "decode/1: tokens equal, logits within T1 of fp64 on the host",
        "| `core::linear` | some_linear | `2 x tile` | 20.0 | 50.0% | 15.0 | 75% |",
        "| without fuse | 32 | 4.750 |",
        "## Kernels against torch\n",
        "4.20 TB/s",
        "| norm | 1 x 4096 | 2.50 | 7.50 | 0.10 |",
    ):
        assert text in page, text
    assert "plan" not in page and "Seconds" not in page  # nobody measured these


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.5, "0.500"), (17.0, "17.0"), (99.96, "100.0"), (123.4, "123.4")]
)
def test_milliseconds_show_three_digits(script: Any, value: float | None, text: str) -> None:
    assert script.ms(value) == text


def test_what_was_not_measured_has_no_column(script: Any) -> None:
    others = {"flashinfer_us": 3.25, "flashinfer_plan_us": 12.0}
    text = script.kernels(timed(others))
    assert "| op | size | `core` | FlashInfer | plan | floor |" in text
    assert "| norm | 1 x 4096 | 2.50 | 3.25 | 12.00 | 0.10 |" in text
    alone = bench()
    alone["cells"][0]["subjects"] = alone["cells"][0]["subjects"][1:]
    assert "sdpa" not in "\n".join(script.bench(alone | {"references": {}}))


def test_the_start_is_shown_by_phase(script: Any) -> None:
    cold = {"phases": {"imports": 9.25, "trace": 6.5}, "total_s": 15.75}
    warm = {"phases": {"imports": 9.0}, "total_s": 9.0}
    text = "\n".join(script.bench(bench() | {"start": {"cold": cold, "warm": warm}}))
    assert "|  | imports | trace | together |" in text
    assert "| cold | 9.25 | 6.50 | 15.8 |" in text
    assert "| warm | 9.00 | 0.00 | 9.0 |" in text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"logits": {"passed": True, "reason": "", "reference": "fp32"}}, "within T1 of fp32"),
        ({"logits": {"passed": False, "reason": "error over bound: rms 3", "reference": "fp32"}}, "BREAK T1 of fp32"),
        (
            {"logits": {"passed": False, "reason": "the yardstick itself is off: 0.4", "reference": "fp32"}},
            "unjudged (the yardstick itself is off: 0.4)",
        ),
        ({"logits_skipped": "no sequence has equal tokens so far"}, "unjudged (no sequence has equal tokens so far)"),
        ({}, "unjudged (not asked for)"),
    ],
)
def test_logits_are_said_to_be_judged_only_where_they_were(script: Any, found: dict[str, Any], text: str) -> None:
    assert script.verdict(found) == text
    said = script.checks({"decode/1": {"check": {"tokens_equal": False, **found}}, "decode/8": None})
    assert said == f"Against eager: decode/1: tokens differ, logits {text}.\n"
    assert "logits unjudged" in script.checks({"decode/1": {"check": None}})


def test_the_page_in_the_tree_is_what_the_script_writes(script: Any) -> None:
    assert (ROOT / "docs/performance.md").read_text(encoding="utf-8") == script.page(ROOT / "docs/performance")


def test_a_folder_without_measurements_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"holds no bench-\*\.json"):
        script.main(tmp_path, tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()
