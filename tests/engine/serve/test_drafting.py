"""A draft model beside the served one: every sequence gets the tokens that it gets without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from core.engine.config import SamplingParams
from core.engine.serve.engine import Engine
from tests.engine.serve.drafted import (
    CONFIG,
    MAX_LEN,
    VOCAB,
    assert_failed_drafts_are_taken_again,
    nearly,
    own_tokens,
    tiny,
)
from tests.engine.serve.drafted import one_thread as one_thread
from tests.recording import acme

EAGER = replace(CONFIG, options=replace(CONFIG.options, mode="off"))
GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.7, seed=3)
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17], [40]]


@pytest.fixture(scope="module", params=["captured", "windows", "unlike"])
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


def draw(rng: random.Random, *, stops: bool = True) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin alike in part, and a third of them sampled."""
    beginnings = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(2)]
    found = []
    for index in range(rng.randint(4, 10)):
        prompt = [*rng.choice([[], *beginnings]), *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))]
        most = rng.randint(1, MAX_LEN - len(prompt))
        params = replace(HOT if index % 3 == 2 else GREEDY, max_new_tokens=most)
        params = replace(
            params, stop_token_ids=tuple(rng.sample(range(VOCAB), 3)) if stops and rng.random() < 0.2 else ()
        )
        found.append((prompt, params))
    return found


def serve(engine: Engine, rng: random.Random, *, stops: bool = True) -> None:
    """Serve what is drawn, some of it aborted, and check each one's tokens."""
    jobs = draw(rng, stops=stops)
    coming, tokens = list(enumerate(jobs)), [[] for _ in jobs]  # type: list[Any], list[list[int]]
    running: dict[int, int] = {}
    while coming or engine.has_unfinished:
        while coming and rng.random() < 0.4:
            index, (prompt, params) = coming.pop(0)
            running[engine.add_request(prompt, params)] = index
        if engine._requests and rng.random() < 0.03:
            engine.abort(rng.choice(list(engine._requests)))
        for output in engine.step():
            tokens[running[output.request_id]] += output.token_ids
    for (prompt, params), found in zip(jobs, tokens, strict=True):
        assert not found or found == own_tokens(engine, prompt, found, params)


@pytest.mark.parametrize("seed", range(8))
def test_each_prompt_gets_its_own_tokens_whatever_the_schedule(engine: Engine, seed: int) -> None:
    serve(engine, random.Random(seed))
    pools = engine._runner.cache.pools  # type: ignore[attr-defined]
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools)  # nobody holds a block any more
    assert not engine.drafter._followers  # type: ignore[attr-defined]


def test_the_schedules_have_what_they_are_for(engine: Engine) -> None:
    before = engine.stats()
    for seed in range(100, 104):
        serve(engine, random.Random(seed))
    after = engine.stats()
    for name in ("preempted", "reused", "mixed_steps", "chunked"):
        assert getattr(after, name) > getattr(before, name), name
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    assert drafted.keys() == {"model"} and accepted["model"] < drafted["model"]
    assert engine.draft is not None
    alike = type(engine.draft.model) is type(engine.loaded.model)
    assert (accepted["model"] > 100) == alike


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_no_draft_of_the_served_model_itself_is_wrong_whatever_the_schedule(model_type: str) -> None:
    """So its cache holds the right keys and values, also behind shared beginnings and after lost caches."""
    with Engine(tiny(model_type), acme(), replace(EAGER, draft_model=tiny(model_type))) as engine:
        for seed in range(200, 206):
            serve(engine, random.Random(seed), stops=False)
        stats = engine.stats()
    assert min(stats.preempted, stats.reused, stats.chunked, stats.mixed_steps) > 0
    assert stats.accepted == stats.drafted and stats.drafted["model"] > 200


def test_a_step_of_the_draft_model_that_fails_is_taken_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_failed_drafts_are_taken_again(engine, PROMPTS, [GREEDY, HOT, GREEDY], monkeypatch, more_than=3)
