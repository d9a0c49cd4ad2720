"""core/engine/parallel/failures.py and what ranks tell: one message names rank, phase and reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from core.engine.parallel import rank as ranks
from core.engine.parallel.failures import RankState, failure, has_culprit
from core.errors import LoweringError, ModelError, UsageError

WAITED = "core_cpu: rank 0 of 2 in group 0 waits in all_reduce for rank 1: it did not come within 8 s."
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path


def outcome(told: Path, error: BaseException) -> Any:
    (told / "outcome").unlink(missing_ok=True)
    ranks.report(error)
    return json.loads((told / "outcome").read_text())


def test_a_rank_that_was_killed_is_named_although_another_one_spoke_first(told: Path) -> None:
    spoke = RankState(rank=0, phase="serve", code=2, outcome=outcome(told, RuntimeError(GLOO)))
    dead = RankState(rank=1, phase="serve", code=-9)
    error = failure("core run", [spoke, dead], 300)
    assert error.asked == "core run on 2 ranks"
    assert error.found == "rank 1 crashed with SIGKILL in phase serve" and "memory" in error.remedy


@pytest.mark.parametrize("words", [WAITED, GLOO])
def test_a_rank_that_says_nothing_while_others_wait_hung(told: Path, words: str) -> None:
    waits = RankState(rank=0, phase="serve", outcome=outcome(told, RuntimeError(words)))
    hung = RankState(rank=1, phase="capture")
    assert waits.waited and not has_culprit([waits, hung])
    error = failure("core serve", [waits, hung], 8)
    assert error.found == "rank 1 hung in phase capture: rank 0 waited in vain" and "8 s" in error.remedy


def test_an_error_of_its_own_is_that_of_the_culprit(told: Path) -> None:
    cause = ModelError("load model 'x'", found="it is damaged", remedy="mend it")
    waits = RankState(rank=0, phase="capture", outcome=outcome(told, RuntimeError(WAITED)))
    broken = RankState(rank=1, phase="load", code=2, outcome=outcome(told, cause))
    error = failure("core run", [waits, broken], 300)
    assert error.found == "rank 1 failed in phase load: load model 'x': it is damaged" and error.remedy == "mend it"


def test_a_mistake_of_the_user_stays_what_it_is_though_others_were_ended_before_they_found_it(told: Path) -> None:
    cause = ModelError("load model 'x'", found="no such folder", remedy="name another")
    broken = RankState(rank=1, phase="load", code=2, outcome=outcome(told, cause))
    error = failure("core run", [broken, RankState(rank=0, phase="load")], 300)
    assert isinstance(error, ModelError) and (error.asked, error.found) == ("load model 'x'", "no such folder")
    assert error.__notes__ == ["rank 1 ended with it first, in phase load"]


@pytest.mark.parametrize("case", ["past it", "ended well", "told otherwise", "its own memory"])
def test_what_is_a_rank_s_own_names_it(told: Path, case: str) -> None:
    cause: BaseException = ModelError("load model 'x'", found="too large", remedy="name another")
    other = ModelError("load model 'y'", found="damaged", remedy="mend it")
    cause.__cause__ = MemoryError("no room") if case == "its own memory" else None
    broken = RankState(rank=1, phase="load", code=2, outcome=outcome(told, cause))
    beside = {
        "past it": RankState(rank=0, phase="capture"),
        "ended well": RankState(rank=0, phase="load", code=0, outcome={"code": 0}),
        "told otherwise": RankState(rank=0, phase="load", code=2, outcome=outcome(told, other)),
        "its own memory": RankState(rank=0, phase="load"),
    }[case]
    found = failure("core run", [broken, beside], 300).found
    assert found.startswith("rank 1 ran out of memory" if case == "its own memory" else "rank 1 failed in phase load")
    behind = failure("core run", [broken, RankState(rank=0, phase="start")], 300)
    assert isinstance(behind, ModelError) is (case != "its own memory")


def test_memory_that_ran_out_is_said(told: Path) -> None:
    broken = RankState(rank=2, phase="load", code=2, outcome=outcome(told, MemoryError("no room")))
    assert "rank 2 ran out of memory in phase load" in failure("core run", [broken, RankState(rank=0)], 300).found


def test_an_error_of_all_ranks_stays_what_it_is(told: Path) -> None:
    same = outcome(told, UsageError("--dtype x", found="unknown", remedy="name another"))
    error = failure("core run", [RankState(rank=each, code=2, outcome=same) for each in range(2)], 300)
    assert isinstance(error, UsageError) and error.asked == "--dtype x"
    assert error.__notes__ == ["all 2 ranks ended with it, in phase start"]


def test_the_last_words_of_a_dead_rank_are_a_note() -> None:
    error = failure("core run", [RankState(rank=1, code=7, last_words="Segmentation"), RankState(rank=0)], 300)
    assert "exit code 7" in error.found and error.__notes__ == ["what rank 1 wrote last:\nSegmentation"]


def test_a_wait_may_be_the_cause_of_an_error() -> None:
    error = LoweringError("lower it", found="it failed", remedy="see above")
    error.__cause__ = RuntimeError(WAITED)
    assert ranks.has_waited(error)


@pytest.mark.parametrize(
    "text",
    [
        "core_cpu: rank 0 of 2 in group 0 waits in all_reduce for rank 1: it called all_gather. All must call the same",
        "mat1 and mat2 shapes cannot be multiplied",
    ],
)
def test_an_error_that_is_no_wait(text: str) -> None:
    assert not ranks.has_waited(RuntimeError(text))


def test_the_first_error_counts_and_a_finished_rank_has_none(told: Path) -> None:
    ranks.report(ValueError("first"))
    ranks.report(ValueError("second"))
    ranks.finish(0)
    assert "first" in (told / "outcome").read_text()
    (told / "outcome").unlink()
    ranks.finish(1)
    assert json.loads((told / "outcome").read_text()) == {"code": 1}


def test_a_process_of_no_launcher_is_alone_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # of something else
    assert (ranks.num_ranks(), ranks.own_rank(), ranks.is_launched()) == (1, 0, False)
    ranks.report(ValueError("unheard"))
    assert ranks.num_ranks({**os.environ, "TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "4"}) == 4
