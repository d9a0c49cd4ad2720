"""Heads that draft: every sequence gets the tokens that it gets without drafts, and each draft is the head's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine.config import OWN_HEADS, SamplingParams
from core.engine.heads.head import Head
from core.engine.models.loading import LoadedModel
from core.engine.paged.model import PagedModel
from core.engine.paged.room import Room
from core.engine.serve.engine import Engine
from core.errors import ModelError, UsageError
from core.host.selection import select_device
from tests.engine.serve.drafted import (
    CONFIG,
    EAGER,
    GREEDY,
    HOT,
    MAX_LEN,
    PROMPTS,
    assert_failed_drafts_are_taken_again,
    assert_nothing_held,
    quick,
    serve,
    serve_all_kinds,
    tiny,
)
from tests.engine.serve.drafted import one_thread as one_thread
from tests.engine.serve.headed import eagle, load, own_drafts, successor, with_own_heads
from tests.recording import acme


def served_and_head(folder: Path, kind: str) -> tuple[LoadedModel, str | Path]:
    """Return a model and what drafts for it, with random weights of which some give right drafts."""
    if kind in ("glm4_moe", "mellum"):
        return load(with_own_heads(folder / "model", kind)), OWN_HEADS
    if kind == "eagle3":
        served = tiny(num_hidden_layers=5)
        return served, eagle(folder / "head", served, 3)
    if kind == "windows":
        served = tiny("mistral", sliding_window=12)
        return served, eagle(folder / "head", served)
    return successor(folder / "head", by="states", noise=0.1)


CAPTURED = ("eagle", "eagle3", "mellum")
"""In graphs that replay what was recorded; the others run eagerly."""
KINDS = ("glm4_moe", "windows", *(pytest.param(kind, marks=pytest.mark.slow) for kind in CAPTURED))


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model and a head."""
    served, head = served_and_head(tmp_path_factory.mktemp("heads"), request.param)
    config = replace(CONFIG if request.param in CAPTURED else EAGER, draft_model=head)
    if request.param == "windows":
        config = replace(config, cache_tokens=MAX_LEN + 16)
    with Engine(served, acme(), config) as engine:
        assert engine.route == "paged"
        yield engine


def compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare all greedy drafts from now on with the head's by forwards without a cache; count them in the list."""
    assert engine.draft is not None
    head, propose, count = engine.draft.model, engine.drafter.propose, [0]
    assert isinstance(head, Head)

    def proposing(wanted: Any) -> Any:
        found = propose(wanted)
        states, head.states = head.states, None
        for (sequence, number), drafts in zip(wanted, found, strict=True):
            text = sequence.prompt + sequence.generated
            if number and sequence.params.greedy:
                assert list(drafts) == own_drafts(head, engine.loaded, engine.native_attention, text, number)
                count[0] += number
        head.states = states
        return found

    monkeypatch.setattr(engine._scheduler, "_propose", proposing)
    return count


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", quick(1, of=4))
def test_tokens_and_drafts_are_right_whatever_the_schedule(
    engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens by the model's own forward, drafts by the head's: of the right states, on the right keys and values."""
    count = compared(engine, monkeypatch)
    before = engine.stats()
    serve(engine, random.Random(seed))
    after = engine.stats()
    assert count[0] > 20 and after.drafted["head"] > before.drafted["head"]
    assert after.drafted.keys() == {"head"}
    assert_nothing_held(engine)


@pytest.mark.cases(1)
def test_the_schedules_have_what_they_are_for(engine: Engine) -> None:
    serve_all_kinds(engine)


@pytest.mark.slow
def test_a_shared_beginning_holds_for_the_token_behind_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head has read that token by the end of a block, so texts that differ there must not share the block."""
    served, head = served_and_head(tmp_path, "glm4_moe")
    beginning = list(range(20, 20 + 2 * CONFIG.block_size))
    with Engine(served, acme(), replace(EAGER, draft_model=head)) as engine:
        count = compared(engine, monkeypatch)
        for token in range(8):
            engine.generate([[*beginning, token]], replace(GREEDY, max_new_tokens=5))
        assert count[0] >= 24
        # Of each but the first, the block before the last is shared; of the same text again, both are.
        assert engine.stats().reused == 7 * CONFIG.block_size
        engine.generate([[*beginning, 3]], GREEDY)
        assert engine.stats().reused == 9 * CONFIG.block_size


@pytest.mark.cases(1)
@pytest.mark.parametrize("by", ["states", "tokens"])
@pytest.mark.parametrize("mode", [pytest.param("captured", marks=pytest.mark.slow), "eager"])
def test_no_draft_is_wrong_of_a_head_that_knows(tmp_path: Path, by: str, mode: str) -> None:
    """A state or a token at another place would make every draft wrong."""
    served, head = successor(tmp_path / "head", by=by)
    config = CONFIG if mode == "captured" else EAGER
    with Engine(served, acme(), replace(config, draft_model=head)) as engine:
        for seed in range(200, 203):
            serve(engine, random.Random(seed), stops=False)
        stats = engine.stats()
    assert min(stats.preempted, stats.reused, stats.chunked, stats.mixed_steps) > 0
    assert stats.accepted == stats.drafted and stats.drafted["head"] > 200


@pytest.mark.cases(1)
@pytest.mark.parametrize("params", [GREEDY, replace(HOT, top_p=0.9)], ids=["greedy", "hot"])
def test_tokens_are_those_without_drafts(tmp_path: Path, params: SamplingParams) -> None:
    served, head = successor(tmp_path / "head", by="states", noise=0.1)
    found = []
    for drafts in ({"draft_model": head}, {"speculative": 0}):
        with Engine(served, acme(), replace(EAGER, **drafts)) as engine:  # type: ignore[arg-type]
            found.append([each.token_ids for each in engine.generate(PROMPTS, params)])
            stats = engine.stats()
            assert ("speculative" in drafts) or 0 < stats.accepted["head"] < stats.drafted["head"]
    assert found[0] == found[1]


@pytest.mark.cases(1)
def test_a_step_of_the_head_that_fails_is_taken_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(engine, monkeypatch)
    assert_failed_drafts_are_taken_again(engine, PROMPTS, [GREEDY, HOT, GREEDY], monkeypatch, more_than=2)


@pytest.mark.slow
def test_a_closed_engine_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    served, head = successor(tmp_path / "head", by="states")
    for _ in range(2):
        with Engine(served, acme(), replace(EAGER, draft_model=head)) as engine:
            assert engine.draft is not None
            assert len(engine._runner.cache.pools) == 2  # type: ignore[attr-defined]
            assert any(each._forward_hooks for each in served.model.modules())
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in served.model.modules())
        assert engine.draft.model.states is None
    with Engine(served, acme(), replace(EAGER, speculative=0)) as engine:
        assert len(engine._runner.cache.pools) == 1  # type: ignore[attr-defined]


def test_the_hidden_states_count_as_cache() -> None:
    device, size = acme(), 4 * 64
    models = [PagedModel(tiny().model, device, EAGER, max_model_len=MAX_LEN, state_bytes=each) for each in (0, size)]
    plain, holding = (Room([each], device, EAGER, max_model_len=MAX_LEN)._size for each in models)
    room = Room(models[1:], device, EAGER, max_model_len=MAX_LEN)
    states = room.make_states(models[1], 64, torch.float32)
    assert states.rows.shape == (holding.num_blocks[0] * CONFIG.block_size, 64) and not states.rows.any()
    assert holding.num_blocks == plain.num_blocks
    assert holding.num_bytes - plain.num_bytes == states.rows.nbytes


def refused(served: LoadedModel, draft: Any, **changes: Any) -> UsageError | ModelError:
    with pytest.raises((UsageError, ModelError)) as caught:
        Engine(served, acme(), replace(EAGER, draft_model=draft, **changes))
    assert not any(hasattr(module, "_core_attention") for module in served.model.modules())
    assert not any(each._forward_hooks for each in served.model.modules())
    return caught.value


@pytest.mark.slow
def test_what_heads_do_not_go_with_is_refused_and_says_why(tmp_path: Path) -> None:
    served, head = successor(tmp_path / "head", by="states")
    assert "can't sleep" in refused(served, head, sleep_mode=True).found
    assert "drafts nothing" in refused(served, OWN_HEADS, speculative=0).found
    assert "the model was built" in refused(served, OWN_HEADS).found
    assert "no such folder" in refused(served, tmp_path / "nowhere").found
    other = tiny(vocab_size=served.vocab_size, hidden_size=32)
    assert "features, those of the served model 32" in refused(other, head).found
    static = tiny("codegen")
    error = refused(static, eagle(tmp_path / "static", tiny()))
    assert "can't run on the paged cache, which alone takes drafts back" in error.found
    with Engine(served, acme(), replace(EAGER, draft_model=head)) as engine:
        with pytest.raises(UsageError, match="a head drafts, which was trained for the model's weights"):
            engine.load_weights({})
        assert engine.generate([[5]], GREEDY)


@pytest.mark.slow
def test_a_second_start_with_a_head_makes_nothing(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, head = successor(tmp_path / "head", by="states")
    options = replace(CONFIG.options, cache=True, strict=False)
    states = []
    for _ in range(2):
        config = replace(CONFIG, options=options, draft_model=head)
        with Engine(served, select_device("cpu"), config) as engine:
            engine.generate([[5, 6, 7]], GREEDY)
            report = engine.drafter.report()
            assert report is not None
            states += [(engine.report().cache.state, report.cache.state)]
            assert engine.stats().accepted["head"] > 0
    assert states == [("miss", "miss"), ("hit", "hit")]
