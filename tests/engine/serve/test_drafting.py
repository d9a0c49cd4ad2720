"""A draft model beside the served one: every sequence gets the tokens that it gets without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from core.engine.serve.engine import Engine
from tests.engine.serve.drafted import (
    CONFIG,
    EAGER,
    GREEDY,
    HOT,
    PROMPTS,
    assert_failed_drafts_are_taken_again,
    assert_nothing_held,
    nearly,
    quick,
    serve,
    serve_all_kinds,
    tiny,
)
from tests.engine.serve.drafted import one_thread as one_thread
from tests.marks import slow_except
from tests.recording import acme


@pytest.fixture(scope="module", params=slow_except(["captured", "windows", "unlike"], "windows", "unlike"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A model and what drafts for it.

    Captured: a draft model that is often right, both in graphs that replay what was recorded. Windows: both models have
    two groups of layers, and run eagerly. Unlike: the draft model has one group more than the served one and other
    weights altogether.
    """
    served = tiny("gemma3_text" if request.param == "windows" else "llama")
    draft = tiny("gemma3_text", seed=5) if request.param == "unlike" else nearly(served, 0.05)
    config = replace(CONFIG if request.param == "captured" else EAGER, draft_model=draft)
    with Engine(served, acme(), config) as engine:
        assert engine.route == "paged"
        assert len(engine._runner.cache.pools) == {"captured": 2, "windows": 4, "unlike": 3}[request.param]  # type: ignore[attr-defined]
        yield engine


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", quick(1, of=8))
def test_each_prompt_gets_its_own_tokens_whatever_the_schedule(engine: Engine, seed: int) -> None:
    serve(engine, random.Random(seed))
    assert_nothing_held(engine)


@pytest.mark.cases(1)
def test_the_schedules_have_what_they_are_for(engine: Engine) -> None:
    before = engine.stats()
    serve_all_kinds(engine, at_least=4)
    after = engine.stats()
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    assert drafted.keys() == {"model"} and accepted["model"] < drafted["model"]
    assert engine.draft is not None
    alike = type(engine.draft.model) is type(engine.loaded.model)
    assert (accepted["model"] > 100) == alike


@pytest.mark.slow
@pytest.mark.parametrize("model_type", slow_except(["llama", "gemma3_text"], "gemma3_text"))
def test_no_draft_of_the_served_model_itself_is_wrong_whatever_the_schedule(model_type: str) -> None:
    """So its cache holds the right keys and values, also behind shared beginnings and after lost caches."""
    with Engine(tiny(model_type), acme(), replace(EAGER, draft_model=tiny(model_type))) as engine:
        for seed in range(200, 206):
            serve(engine, random.Random(seed), stops=False)
        stats = engine.stats()
    assert min(stats.preempted, stats.reused, stats.chunked, stats.mixed_steps) > 0
    assert stats.accepted == stats.drafted and stats.drafted["model"] > 200


@pytest.mark.cases(1)
def test_a_step_of_the_draft_model_that_fails_is_taken_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_failed_drafts_are_taken_again(engine, PROMPTS, [GREEDY, HOT, GREEDY], monkeypatch, more_than=3)
