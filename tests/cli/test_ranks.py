"""`--tp`: what one rank and several do, and what is refused; test_rank_failures.py has how ranks end."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_one_rank_is_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.run_on_ranks(None, 300) is None and ranks.run_on_ranks(1, 300) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.run_on_ranks(None, 300) is None and ranks.run_on_ranks(4, 300) is None


def test_a_launcher_and_the_option_may_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with refused(UsageError, "--tp 2", "one of 4 ranks"):
        ranks.run_on_ranks(2, 300)


def test_adapters_are_refused() -> None:
    with refused(UsageError, "--lora with 2 ranks"):
        ranks.run_on_ranks(2, 300, lora=["a=folder"])


def test_a_draft_model_is_refused() -> None:
    with refused(UsageError, "--draft-model with 2 ranks"):
        ranks.run_on_ranks(2, 300, draft_model="x")
