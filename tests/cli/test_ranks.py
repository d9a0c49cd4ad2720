"""`--tp`: what one rank and several do, and what is refused; test_rank_failures.py has how ranks end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.cli import ranks
from core.errors import UsageError
from tests.cli.planted import command
from tests.support import refused


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["", "int8", "int8-static"])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, quantize: str) -> None:
    planted = command(tmp_path, "none - -", "--check", *(["--quantize", quantize] if quantize else []))
    done = planted.run()
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ranks"]["size"] == 2
    assert found["check"]["passed"] and found["check"]["tokens_equal"] and found["check"]["verdict"]["passed"]
    assert planted.traces.settled() == []


@pytest.mark.slow
def test_bench_judges_the_logits_of_all_ranks(tmp_path: Path) -> None:
    cell = ("--subjects", "eager,core", "--batch", "2", "--prefill", "", "--context", "16", "--rounds", "1")
    arguments = ("bench", "llama", "--device", "cpu", "--tp", "2", *cell, "--steps", "2", "--lowering", "inline")
    command = [sys.executable, "-m", "core", *arguments, "--json", str(tmp_path / "found")]
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=240, text=True)
    assert done.returncode == 0, done.stderr
    subjects = json.loads((tmp_path / "found").read_text())["cells"][0]["subjects"]
    core = next(each for each in subjects if each["subject"] == "core")
    assert core["check"]["tokens_equal"] and core["check"]["logits"]["passed"]


@pytest.mark.slow
@pytest.mark.usefixtures("cache_folder")
def test_a_second_start_of_two_ranks_takes_graphs_from_disk() -> None:
    arguments = ("run", "llama", "--device", "cpu", "--tp", "2", "--lowering", "inline", "--no-check", "--json")
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    command, found = [sys.executable, "-m", "core", *arguments], []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, timeout=240, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [each["program"]["cache"]["state"] for each in found] == ["miss", "hit"]
    assert found[0]["completions"] == found[1]["completions"]


def test_one_rank_is_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"device": "cpu:0", "draft_model": "x", "lora": ["a=folder"]}
    assert ranks.check_ranks(None, **given) == ranks.check_ranks(1, **given) == 1
    assert ranks.run_on_ranks(1, 300, **given) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.check_ranks(None) == ranks.check_ranks(4) == 4
    assert ranks.run_on_ranks(4, 300) is None


def test_a_launcher_and_the_option_may_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with refused(UsageError, "--tp 2", "one of 4 ranks"):
        ranks.check_ranks(2)


CANT: dict[str, dict[str, Any]] = {
    "--lora with 2 ranks": {"lora": ["a=folder"]},
    "--draft-model with 2 ranks": {"draft_model": "x"},
    "--device cpu:0 on 2 ranks": {"device": "cpu:0"},
}


@pytest.mark.parametrize("words", CANT)
def test_what_several_ranks_cannot_do_is_refused(words: str) -> None:
    with refused(UsageError, words):
        ranks.check_ranks(2, **CANT[words])
    with refused(UsageError, words):
        ranks.run_on_ranks(2, 300, **CANT[words])
