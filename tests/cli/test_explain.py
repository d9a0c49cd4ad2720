"""`core explain` through the command line: the tables, the page, the document, and each way to be refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import main

EXPLAIN = ["explain", "--device", "cpu", "--phase", "decode"]
InstallVendor = Callable[..., Any]

BROKEN = """
from core.common.passes.declaration import Pass

def run(context):
    raise ValueError("out of cheese")

@hookimpl
def core_open_device(context):
    return parts()

@hookimpl
def core_register_passes(context):
    return (Pass(name="acme_broken", run=run),)
"""


@pytest.mark.slow
def test_the_tables_tell_passes_layers_and_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLAIN, "llama", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM, llama, built tiny with random weights" in out
    assert re.search(r"lift_rms_norm +core +5 ", out)
    assert re.search(r"^ ops +outside layers +model.layers.0", out, re.M)
    assert re.search(r"^ core::rms_norm +[1-9]\d* ", out, re.M)
    assert "prefill" not in out


@pytest.mark.slow
def test_the_document_has_the_documented_fields_and_the_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main([*EXPLAIN, "--html", str(page), "--full", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    document = json.loads(out)
    assert document["schema"] == "core.explain/1"
    assert document["model"]["model"].startswith("LlamaForCausalLM, the embedded model")
    assert document["html"] == str(page)
    (phase,) = document["phases"]
    stage = phase["stages"][0]
    matched = {report["name"]: report["matched"] for report in stage["passes"]}
    layers = [layer["layer"] for layer in stage["layers"] if layer["layer"] != "outside layers"]
    assert matched["lift_rms_norm"] == 2 * len(layers) + 1
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## core.explain/1")[2].partition("\n## ")[0]
    objects = [document, document["device"], document["model"], phase, phase["ops"][0], stage, stage["passes"][0]]
    objects += [stage["changes"][0], stage["layers"][0], stage["nodes"]["before"][0], stage["num_nodes"]]
    named = {name for item in objects for name in item} - {"schema", "core"}
    assert not [name for name in sorted(named) if f"`{name}`" not in section]
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert html.count('<p id="') >= stage["num_nodes"]["before"]


@pytest.mark.slow
def test_a_quantised_cache_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLAIN, "llama", "--kv-cache-dtype", "fp8", "--full", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"]["cache"].startswith("paged, fp8 codes: ")
    nodes = document["phases"][0]["stages"][0]["nodes"]["after"]
    caches = [node["value"] for node in nodes if node["label"].endswith(("key_cache", "value_cache"))]
    assert caches and all(value.startswith("float8_e4m3fn") for value in caches)


@pytest.mark.slow
def test_the_errors_of_quantised_layers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    arguments = [*EXPLAIN, "--quantize", "int8-static", "--sensitivity", "--html", str(page)]
    assert main([*arguments, "--only-pass", "lift_rms_norm", "--json"]) == 0
    quantization = json.loads(capsys.readouterr().out)["quantization"]
    by_error = sorted(quantization["layers"], key=lambda layer: layer["output_error"], reverse=True)
    assert {layer["name"].rpartition(".")[2] for layer in by_error[:4]} == {"down_proj"}
    assert max(quantization["layers"], key=lambda layer: layer["divergence"])["name"].endswith(".down_proj")
    assert 0 < max(layer["divergence"] for layer in quantization["layers"]) < 2 * quantization["divergence"]
    html = page.read_text(encoding="utf-8")
    assert by_error[0]["name"] in re.findall(r'<tr><td>([^<]*)</td>(?:(?!</tr>).)*class="r bad"', html)


@pytest.mark.slow
def test_the_graphs_of_one_of_several_ranks_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLAIN, "gpt_oss", "--tp", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"]["rank"].startswith("0 of 2, with 50% of the parameters; ")
    assert "moe_tp_experts: model.layers.*.mlp.experts (added)" in document["model"]["cut"]
    matched = {each["name"]: each["matched"] for each in document["phases"][0]["stages"][0]["passes"]}
    # In each of two layers the sum of attention; between that of the experts and its norm is a view.
    assert matched["fuse_all_reduce_norm"] == 2
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_full_prints_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLAIN, "llama", "--full", "--only-pass", "lift_rms_norm"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^- rsqrt.* = rsqrt\(.*\[lift_rms_norm\]$", out, re.M)
    assert re.search(r"^\+ .*core::rms_norm\(", out, re.M)
    assert "left out: " in out


@pytest.mark.slow
def test_a_pass_that_was_undone_is_a_failure(install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]) -> None:
    install_vendor(plugin=BROKEN)
    # The vendor's device has no memory for a paged cache.
    arguments = ["explain", "llama", "--device", "acme", "--cache", "static", "--phase", "decode"]
    arguments += ["--only-pass", "acme_broken"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "UNDONE" in out and "out of cheese" in out
    assert main([*arguments, "--strict"]) == 2
    assert "acme_broken" in capsys.readouterr().err


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("lama",), "did you mean the type 'llama'?"),
        (("./nowhere",), "nowhere"),
        (("llama", "--dtype", "int8"), "the choices are auto"),
        (("llama", "--phase", "training"), "the choices are prefill, decode"),
        (("llama", "--kv-cache-dtype", "fp4"), "the choices are auto, fp8"),
        (("llama", "--kv-cache-dtype", "fp8", "--cache", "static"), "only a paged cache holds fp8 codes"),
        (("mamba", "--kv-cache-dtype", "fp8"), "on the paged cache"),
        (("llama", "--no-pass", "lift_rms_nrm"), "did you mean 'lift_rms_norm'?"),
        (("llama", "--html", "/nowhere/page.html"), "there is no folder '/nowhere'"),
        (("llama", "--html", "/"), "it is a folder"),
        (("llama", "--tp", "2", "--kernels"), "its collectives compute nothing"),
        (("llama", "--sensitivity"), "--sensitivity found: nothing is quantised"),
    ],
)
def test_wrong_wishes_are_refused(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert text in " ".join(err.split())
    assert not out and "Traceback" not in err


def test_a_folder_of_that_name_wins_over_a_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([*EXPLAIN, "llama"]) == 2
    assert "config.json" in capsys.readouterr().err
