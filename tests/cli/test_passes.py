"""`core passes`: the order of execution, whose passes, what they ask for, and which are enabled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.manager import PassManager
from core.host.selection import select_device

InstallVendor = Callable[..., Any]
ON_REQUEST = ("sequence_parallel",)

VENDOR = """
from core.common.passes import Guards, Pass, PassResult

def run(context):
    '''Does [nothing] at all.

    And at length.
    '''
    return PassResult(matched=0)

@hookimpl
def core_open_device(context):
    return parts()

@hookimpl
def core_register_passes(context):
    guards = Guards(dtypes=frozenset({torch.float32}), tokens=(1, None), capabilities={"simd": 4})
    return (
        Pass(name="acme_late", run=run, stage="aten", expect=3),
        Pass(
            name="acme_first",
            does="Does [nothing] at all.",
            run=run,
            before=("lift_rms_norm",),
            guards=guards,
            expect=lambda context: 2,
        ),
    )
"""


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["passes", *arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


@pytest.mark.slow
def test_without_a_device_the_passes_of_all_are_listed_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys)
    assert (code, document["schema"], document["device"]) == (0, "core.passes/1", None)
    every = PassManager(COMMON_PASSES, enable=("fix_functionalization",)).passes
    assert [item["name"] for item in document["passes"]] == [p.name for p in every]
    assert all(item["owner"] == "core" and item["does"] for item in document["passes"])
    # It closes a stage, and runs where another pass has that stage.
    assert [item["name"] for item in document["passes"] if not item["enabled"]] == [
        *ON_REQUEST,
        "fix_functionalization",
    ]


@pytest.mark.slow
def test_what_runs_on_request_alone_says_so_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys)
    told = {item["name"]: item["on_request"] for item in document["passes"] if item["on_request"]}
    assert list(told) == list(ON_REQUEST) and told["sequence_parallel"].startswith("two collectives take longer")
    assert main(["passes"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sequence_parallel +core +on request: .* Only if asked for: two collectives", out)
    for switch in ("--pass", "--only-pass"):
        _, document = run_json(capsys, switch, "sequence_parallel")
        (item,) = (item for item in document["passes"] if item["name"] == "sequence_parallel")
        assert item["enabled"] and item["on_request"] == told["sequence_parallel"]
    assert main(["passes", "--pass", "sequence_parallel"]) == 0
    assert re.search(r"sequence_parallel +core +(?!on request)", capsys.readouterr().out)


def test_what_a_device_finds_unprofitable_runs_on_request_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys, "--device", "cpu")
    (item,) = (item for item in document["passes"] if item["name"] == "merge_linears")
    assert (item["enabled"], item["on_request"]) == (
        False,
        select_device("cpu").capabilities.unprofitable[item["name"]],
    )


def test_a_device_adds_its_own_in_the_order_of_execution(
    install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]
) -> None:
    install_vendor(plugin=VENDOR)
    _, document = run_json(capsys, "--device", "acme", "--no-pass", "lift_rotary")
    passes = {item["name"]: item for item in document["passes"]}
    names = list(passes)
    assert names.index("acme_first") < names.index("lift_rms_norm")
    assert names[-1] == "acme_late"  # after all of stage torch, although registered first
    first = passes["acme_first"]
    assert first["owner"] == "acme-device"
    assert first["guards"] == {"dtypes": ["float32"], "capabilities": {"simd": 4}, "tokens": [1, None]}
    assert (first["expect"], passes["acme_late"]["expect"]) == ("computed per graph", 3)
    assert first["does"] == "Does [nothing] at all."
    off = [name for name, item in passes.items() if not item["enabled"]]
    assert set(off) == {"lift_rotary", *ON_REQUEST, "fix_functionalization"}
    assert document["device"] == {"name": "acme", "plugin": "acme-device 1.0"}


@pytest.mark.slow
def test_the_table_shows_order_guards_and_what_is_off(
    install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vendor(plugin=VENDOR)
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["passes", "--device", "acme", "--only-pass", "acme_first"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"acme_first +acme-device +Does \[nothing\] at all\.\n", out)
    assert re.search(r"lift_rms_norm +core +off: ", out)
    assert "uuid" not in out
    assert all(len(line) <= 80 and line == line.rstrip() for line in out.splitlines())
    assert main([*arguments, "--full"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "stage torch, mechanism graph; before lift_rms_norm; dtypes float32; capabilities simd=4; tokens 1, any;"
        " expects computed per graph; uuid" in text
    )
    assert "stage aten, mechanism graph; expects 3; uuid" in text


def test_no_passes_turns_all_off(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys, "--no-passes")
    assert not any(item["enabled"] for item in document["passes"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--no-pass", "lift_rms_nrm"), "did you mean 'lift_rms_norm'?"),
        (("--no-passes", "--no-pass", "lift_rms_norm"), "give one of the two"),
        (("--device", "acm"), "no installed plugin"),
    ],
)
def test_wrong_wishes_are_refused(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_every_field_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys)
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## core.passes/1")[2].partition("\n## ")[0]
    named = {name for item in (document, *document["passes"]) for name in item} - {"schema", "core"}
    assert not [name for name in sorted(named) if f"`{name}`" not in section]


@pytest.mark.slow
def test_every_process_tells_the_same_identities() -> None:
    found = []
    for hash_seed in ("1", "2"):
        # Not this process: tests before may have declared ops, which are part of what passes look for.
        run = subprocess.run(
            [sys.executable, "-m", "core", "passes", "--json"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        found.append({item["name"]: item["uuid"] for item in json.loads(run.stdout)["passes"]})
    assert found[0] == found[1] != {}
