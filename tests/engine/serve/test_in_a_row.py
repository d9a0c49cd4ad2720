"""Decode steps that run in a row before the host looks at their tokens: the same tokens, fewer turns of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.models.loading import load_model
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.serve.stepping import MOST, TURN_S, Pace
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError
from tests.engine.models.shallow import shallow_model
from tests.recording import acme

TEXTS = ["If the argument is", "Return a list of the names", "This", "The Python interpreter is a program that reads"]
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=96,
    decode_buckets=(1, 4),
    prefill_buckets=(64,),
    decode_steps=5,
    options=CompileOptions(lowering="inline"),
)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


class OneByOne:
    """The same engine, which looks at the tokens of each step while this generates."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, *args: Any, **options: Any) -> list[Completion]:
        self.engine._steps.pace.most = 1
        before = self.engine.stats().in_a_row
        try:
            return self.engine.generate(*args, **options)
        finally:
            assert self.engine.stats().in_a_row == before
            self.engine._steps.pace.most = 5


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(shallow_model(), acme(), CONFIG) as engine:
        assert engine.route == "paged" and not engine.runs_ahead
        yield engine


@pytest.fixture
def one_by_one(engine: Engine) -> OneByOne:
    return OneByOne(engine)


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def counts(engine: Engine, action: Any) -> tuple[Any, dict[str, int]]:
    """Return what the action gives, and what the engine counted meanwhile."""
    before = engine.stats()
    result = action()
    after = engine.stats()
    return result, {
        "decode": after.steps["decode"] - before.steps["decode"],
        "in_a_row": after.in_a_row - before.in_a_row,
        "computed": after.computed - before.computed,
        "discarded": after.discarded - before.discarded,
    }


def test_the_same_tokens_with_fewer_turns(engine: Engine, one_by_one: OneByOne) -> None:
    expected = ids(one_by_one.generate(TEXTS, GREEDY))
    found, counted = counts(engine, lambda: engine.generate(TEXTS, GREEDY))
    assert ids(found) == expected
    # The first token is the prompt's; 23 more are 4 times 5 and once 3.
    prompts = sum(len(each.prompt_token_ids) - each.num_cached_tokens for each in found)
    assert counted == {"decode": 23, "in_a_row": 18, "computed": prompts + 4 * 23, "discarded": 0}


def test_blocks_and_context_end_in_the_middle(engine: Engine, one_by_one: OneByOne) -> None:
    """Steps in a row cross the borders of cache blocks (16), and stop where the context does (96)."""
    prompt = [[index % 50 + 5 for index in range(70)]]
    params = replace(GREEDY, max_new_tokens=90)
    expected = one_by_one.generate(prompt, params)
    found = engine.generate(prompt, params)
    assert ids(found) == ids(expected) and len(found[0].token_ids) == 26


def test_sequences_that_end_in_turn(engine: Engine, one_by_one: OneByOne) -> None:
    each = [replace(GREEDY, max_new_tokens=count) for count in (1, 4, 9, 2)]
    expected = ids(one_by_one.generate(TEXTS, each))
    found, counted = counts(engine, lambda: engine.generate(TEXTS, each))
    assert ids(found) == expected
    assert counted["discarded"] == 0  # each end is known beforehand


@pytest.mark.slow
def test_tokens_behind_a_stop_token_are_discarded(engine: Engine, one_by_one: OneByOne) -> None:
    alone = one_by_one.generate(TEXTS, GREEDY)
    params = replace(GREEDY, stop_token_ids=(alone[1].token_ids[6],))
    expected = one_by_one.generate(TEXTS, params)
    found, counted = counts(engine, lambda: engine.generate(TEXTS, params))
    assert ids(found) == ids(expected) and [each.text for each in found] == [each.text for each in expected]
    assert len(set(map(len, ids(expected)))) > 1 and counted["discarded"] >= 1
    assert ids(engine.generate(TEXTS, GREEDY)) == ids(alone)  # nothing is left behind


def test_a_stop_string_cuts_the_text_within_a_row(engine: Engine, one_by_one: OneByOne) -> None:
    text = one_by_one.generate(TEXTS[:1], GREEDY)[0].text
    params = replace(GREEDY, stop=(text[len(text) // 2 :][:4],))
    (expected,), (found,) = one_by_one.generate(TEXTS[:1], params), engine.generate(TEXTS[:1], params)
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids) and found.finish_reason == "stop"


@pytest.mark.slow
def test_random_tokens_are_those_of_the_seed(engine: Engine, one_by_one: OneByOne) -> None:
    hot = [replace(GREEDY, temperature=1.3, top_k=50, top_p=0.95, seed=seed) for seed in range(3)]
    expected = ids(one_by_one.generate(TEXTS, [*hot, GREEDY]))
    found, counted = counts(engine, lambda: engine.generate(TEXTS, [*hot, GREEDY]))
    assert ids(found) == expected and counted["in_a_row"] > 0
    assert len(set(ids(engine.generate(TEXTS[:1] * 3, hot)))) == 3


@pytest.mark.slow
def test_what_the_host_must_see_comes_one_by_one(engine: Engine, one_by_one: OneByOne) -> None:
    for params, options in (
        (replace(GREEDY, logprobs=1), {}),
        (replace(GREEDY, frequency_penalty=0.7), {}),
        (GREEDY, {"collect_logits": True}),
    ):
        expected = one_by_one.generate(TEXTS[:1], params, **options)
        found, counted = counts(engine, lambda: engine.generate(TEXTS[:1], params, **options))  # noqa: B023
        assert ids(found) == ids(expected) and counted["in_a_row"] == 0
        assert found[0].logprobs == expected[0].logprobs


@pytest.mark.slow
def test_requests_that_join_and_leave_in_between(engine: Engine, one_by_one: OneByOne) -> None:
    expected = {text: one_by_one.generate([text], GREEDY)[0].token_ids for text in TEXTS}
    first, aborted = (engine.add_request(text, GREEDY) for text in TEXTS[:2])
    outputs: dict[int, list[int]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.token_ids)

    steps(2)
    engine.abort(aborted)
    joined = engine.add_request(TEXTS[2], GREEDY)
    steps(3)
    late = engine.add_request(TEXTS[3], GREEDY)
    while engine.has_unfinished:
        steps(1)
    for request, text in ((first, TEXTS[0]), (joined, TEXTS[2]), (late, TEXTS[3])):
        assert tuple(outputs[request]) == expected[text]
    assert tuple(outputs[aborted]) == expected[TEXTS[1]][: len(outputs[aborted])]


def test_a_row_that_fails_in_the_middle_is_computed_again(
    engine: Engine, one_by_one: OneByOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_by_one.generate(TEXTS[:2], GREEDY)
    staging, failed = engine._runner._staged._staging, 0  # type: ignore[attr-defined]
    replay = staging.replay

    def replay_or_error(*args: Any, **named: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed % 4 == 3:
            raise RuntimeError("the device is away")
        return replay(*args, **named)

    requests = [engine.add_request(text, GREEDY) for text in TEXTS[:2]]
    engine._steps.pace.most = 2  # so that some rows get through
    monkeypatch.setattr(staging, "replay", replay_or_error)
    tokens: dict[int, list[int]] = {request: [] for request in requests}
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError:
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    engine._steps.pace.most = 5
    assert failed > 12 and [tuple(tokens[request]) for request in requests] == ids(expected)


@pytest.mark.slow
def test_a_cache_that_is_full_gives_shorter_rows() -> None:
    """No sequence loses its cache to a row of others."""
    config = replace(CONFIG, cache_tokens=96, prefix_caching=False, decode_steps=16)
    with Engine.load(shallow_model(), acme(), config) as engine:
        params = replace(GREEDY, max_new_tokens=40)
        found = [each.token_ids for each in engine.generate(TEXTS, params)]
        alone = [engine.generate([text], params)[0].token_ids for text in TEXTS]
        assert found == alone and engine.stats().in_a_row > 0


def test_the_pace_follows_the_time_of_steps() -> None:
    pace = Pace(None)
    assert pace.times(1) == 1  # nothing is known yet
    pace.took(1, 1, TURN_S / 4)
    assert (pace.times(1), pace.times(2)) == (4, 1)
    for _ in range(20):
        pace.took(1, 4, TURN_S * 8)
    assert pace.times(1) == 1
    for _ in range(40):
        pace.took(1, 1, TURN_S / 1000)
    assert pace.times(1) == MOST
    assert Pace(3).times(1) == 3


def test_a_number_that_is_none_is_refused() -> None:
    for steps in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="decode_steps"):
            EngineConfig(decode_steps=steps)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_processor_runs_steps_in_a_row_by_itself() -> None:
    """Where steps are short; and the tokens are those of the model's own forward."""
    loaded = load_model(embedded_model(), torch_device=torch.device("cpu"))
    config = replace(CONFIG, decode_steps=None, options=CompileOptions())
    with Engine(loaded, "cpu", config) as engine:
        found = engine.generate(TEXTS[:1], replace(GREEDY, max_new_tokens=64))[0]
        assert engine.stats().in_a_row > 0
    prompt = torch.tensor([found.prompt_token_ids])
    own = loaded.model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert tuple(own[0, prompt.shape[1] :].tolist()) == found.token_ids
