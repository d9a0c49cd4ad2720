"""`core bench --serve` through the command line: the table, the document, the timeline, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import main

SERVE = [
    *("bench", "--serve", "--preset", "tiny-llama", "--device", "cpu", "--mode", "off", "--max-num-seqs", "2"),
    *("--requests", "3", "--prompt-tokens", "4", "--output-tokens", "3", "--max-model-len", "16"),
]


def test_a_load_is_served_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline, document = tmp_path / "timeline.json", tmp_path / "load.json"
    assert main([*SERVE, "--timeline", str(timeline), "--json", str(document)]) == 0
    out = capsys.readouterr().out
    assert "12 of prompts, 9 generated" in out and f"written: {timeline}" in out
    assert "LlamaForCausalLM, float32, paged cache, on cpu" in out and "shorter than drawn" not in out
    for row in ("to the first token", "between tokens"):
        (line,) = (line for line in out.splitlines() if line.startswith(row))
        assert re.search(r"p50 \d+\.\d ms, p95 \d+\.\d ms, p99 \d+\.\d ms", line)
    found = json.loads(document.read_text())
    assert found["schema"] == "core.bench_load/1"
    assert (found["output_tokens"], found["counts"]["joined"], found["load"]["num_requests"]) == (9, 3, 3)
    for name in ("first_token_s", "between_tokens_s"):
        assert list(found[name]) == ["p50", "p95", "p99"]
        assert 0 < found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"] <= found["seconds"]
    assert (found["served_by"]["device"], found["served_by"]["route"], found["cut"]) == ("cpu", "paged", 0)
    assert len(json.loads(timeline.read_text())["traceEvents"]) > sum(found["counts"]["steps"].values())
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## core.bench_load/1")[2].partition("\n## ")[0]
    assert not [name for name in found if f"`{name}`" not in section and name not in ("schema", "core")]


def test_requests_that_the_context_cuts_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, "--prompt-tokens", "15:40"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "shorter than drawn 3 requests, to the context of 16 tokens" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--prompt-tokens", "9:1"], "lengths are written"),
        (["--requests", "0"], "there is nothing to serve"),
        (["--rate", "0"], "no rate above 0"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--timeline", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["--plot", "p.svg"], "--plot with --serve"),
        (["--context", "8"], "--context with --serve"),
    ],
)
def test_a_load_that_is_none_is_refused(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, *more]) == 2
    assert said in capsys.readouterr().err


def test_options_of_a_load_say_nothing_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--preset", "tiny-llama", "--device", "cpu", "--rate", "3"]) == 2
    assert "--rate without --serve" in capsys.readouterr().err
