"""`core bench` through the command line: the table, the document, the plot, and each way to be refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench import rates
from core.cli import main
from tests.page import Page

BENCH = ["bench", "--preset", "tiny-llama", "--device", "cpu"]
SMALL = [*BENCH, "--batch", "1", "--context", "16", "--prefill", "", "--rounds", "2", "--steps", "2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure rates on little: they are no matter here."""
    quickly = partial(rates.measure_rates, copy_bytes=(2**16,), sizes=(64,))
    monkeypatch.setattr("core.bench.bench.measure_rates", quickly)


@pytest.mark.slow
def test_the_table_the_document_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others, plot, document = tmp_path / "others.json", tmp_path / "p.svg", tmp_path / "d.json"
    others.write_text('{"engine A": {"decode/1": 1.5}}')
    page = tmp_path / "p.html"
    files = ["--json", str(document), "--plot", str(plot), "--html", str(page), "--reference", str(others)]
    assert (
        main(
            [
                *SMALL,
                "--subjects",
                "eager,core",
                "--lowering",
                "inline",
                "--no-pass",
                "lift_rotary",
                "--profile",
                *files,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "tiny-llama, random weights" in out and "engine A" in out and "logits hold T1" in out
    assert "kernels of core, decode/1" in out and "mlp.down_proj" in out and f"written: {plot}" in out
    found = json.loads(document.read_text())
    assert found["schema"] == "core.bench/1" and found["plot"] == str(plot)
    assert found["html"] == str(page) and "engine A" in Page(page.read_text(encoding="utf-8")).texts
    assert found["settings"]["options"]["disable_passes"] == ["lift_rotary"]
    _check_documented(found)
    (cell,) = found["cells"]
    passes = cell["subjects"][1]["program"]["traces"][0]["passes"]
    assert "lift_rms_norm" in passes and "lift_rotary" not in passes
    texts = [element.text for element in ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert "engine A" in texts and "batch 1" in texts


def _check_documented(document: dict[str, Any]) -> None:
    """Check that docs/json.md names every field of the document."""
    (cell,) = document["cells"]
    kernels = cell["kernels"]
    assert kernels["phase"] == "decode" and kernels["layers"][0]["name"].startswith("model.layers.0")
    eager, ours = cell["subjects"]
    layer = kernels["layers"][0]
    objects = [document, document["device"], document["rates"], document["model"], document["settings"], cell, eager]
    objects += [ours, ours["check"], ours["program"], ours["program"]["traces"][0], cell["floor"], kernels, layer]
    objects += [layer["nodes"][0], layer["nodes"][0]["kernels"][0]]
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## core.bench/1")[2].partition("\n## ")[0]
    named = {name for item in objects for name in item} - {"schema", "core"}
    assert not [name for name in sorted(named) if f"`{name}`" not in section]


@pytest.mark.slow
def test_json_to_standard_output_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--subjects", "eager", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [subject["subject"] for subject in document["cells"][0]["subjects"]] == ["eager"]
    assert document["start"] is None and document["cells"][0]["kernels"] is None


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (["--subjects", "eager,fast"], ("--subjects", "fast")),
        (["--preset", "gpt-9"], ("--preset 'gpt-9'", "llama-8b")),
        (["--batch", "0"], ("--batch 0", "below 1")),
        (["--batch", "many"], ("--batch 'many'", "whole numbers")),
        (["--context", "600"], ("--context 600", "512 positions")),
        (["--plot", "x.pdf"], ("--plot 'x.pdf'", ".svg")),
        (["--plot", "nowhere/x.svg"], ("no folder",)),
        (["--html", "nowhere/x.html"], ("--html", "no folder")),
        (["--json", "nowhere/x.json"], ("--json", "no folder")),
        (["--reference", "nowhere.json"], ("--reference", "can't be read")),
        (["llama"], ("two models",)),
        (["--no-pass", "lift_nothing"], ("lift_nothing",)),
        (["--dtype", "int4"], ("--dtype int4",)),
        (["--device", "tpu9"], ("tpu9",)),
    ],
)
def test_each_refusal_is_one_error(
    arguments: list[str],
    phrases: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error:") == 1 and "to do:" in captured.err and captured.out == ""
    assert all(phrase in captured.err for phrase in phrases)


def test_an_error_is_a_document_where_one_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--batch", "0", "--json", "-"]) == 2
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == "core.error/1" and document["error"]["type"] == "UsageError"


@pytest.mark.slow
def test_a_quantised_cache_is_measured_and_judged_by_its_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "d.json"
    options = ["--subjects", "eager,core", "--lowering", "inline", "--kv-cache-dtype", "fp8", "--json", str(document)]
    options += ["--context", "12"]  # where the codes change no token: a cell is judged where tokens are equal
    assert main([*SMALL, *options, "--profile"]) == 0
    assert "logits hold T1" in capsys.readouterr().out
    found = json.loads(document.read_text())
    assert found["settings"]["options"]["kv_cache_dtype"] == "fp8"
    assert found["cells"][0]["subjects"][1]["check"]["logits"]["reference"].endswith("of the cache's codes")
    assert found["cells"][0]["kernels"]["notes"] == ["the cache holds fp8 codes"]


@pytest.mark.parametrize("command", [SMALL, ["run", "--device", "cpu"]], ids=lambda command: command[0])
def test_an_unknown_cache_dtype_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--kv-cache-dtype", "fp4"]) == 2
    assert "--kv-cache-dtype fp4" in capsys.readouterr().err
