"""Decode steps that are queued before the tokens of the step before are known: the same tokens, and less waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from tests.engine.models.shallow import shallow_model
from tests.recording import acme

TEXTS = ["If the argument is", "Return a list of the names", "This", "The Python interpreter is a program that reads"]
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=96,
    decode_buckets=(1, 4),
    prefill_buckets=(64,),
    run_ahead=True,
    options=CompileOptions(lowering="inline"),
)
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


class Waiting:
    """The same engine, which waits for each step's tokens while this generates."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats = engine.stats

    def generate(self, *args: Any, **options: Any) -> list[Completion]:
        self.engine.runs_ahead = False
        try:
            return self.engine.generate(*args, **options)
        finally:
            self.engine.runs_ahead = True


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine that runs ahead, on a device that replays what it recorded."""
    with Engine.load(shallow_model(), acme(), CONFIG) as engine:
        assert engine.route == "paged" and engine.runs_ahead
        yield engine


@pytest.fixture
def waiting(engine: Engine) -> Waiting:
    return Waiting(engine)


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def counts(engine: Engine | Waiting, action: Any) -> tuple[Any, dict[str, int]]:
    """Return what the action gives, and what the engine counted meanwhile."""
    before = engine.stats()
    result = action()
    after = engine.stats()
    return result, {
        "decode": after.steps.get("decode", 0) - before.steps.get("decode", 0),
        "ahead": after.ahead - before.ahead,
        "discarded": after.discarded - before.discarded,
    }


@pytest.mark.slow
def test_every_decode_step_runs_ahead_and_none_in_vain(engine: Engine, waiting: Waiting) -> None:
    found, counted = counts(engine, lambda: engine.generate(TEXTS[:3], GREEDY))
    expected, others = counts(waiting, lambda: waiting.generate(TEXTS[:3], GREEDY))
    assert ids(found) == ids(expected)
    assert counted == {"decode": 11, "ahead": 11, "discarded": 0}
    assert others == {"decode": 11, "ahead": 0, "discarded": 0}


@pytest.mark.slow
def test_sequences_that_end_in_turn(engine: Engine, waiting: Waiting) -> None:
    each = [replace(GREEDY, max_new_tokens=count) for count in (1, 4, 9, 2)]
    found, counted = counts(engine, lambda: engine.generate(TEXTS, each))
    assert ids(found) == ids(waiting.generate(TEXTS, each))
    assert counted["ahead"] > 0 and counted["discarded"] == 0  # each end is known beforehand


def test_a_stop_token_ends_a_sequence_whose_next_step_runs_already(engine: Engine, waiting: Waiting) -> None:
    alone = waiting.generate(TEXTS, replace(GREEDY, max_new_tokens=20))
    stopping = alone[1].token_ids[6]
    params = replace(GREEDY, max_new_tokens=20, stop_token_ids=(stopping,))
    found, counted = counts(engine, lambda: engine.generate(TEXTS, params))
    expected = waiting.generate(TEXTS, params)
    assert ids(found) == ids(expected) and len(set(map(len, ids(expected)))) > 1
    assert counted["discarded"] >= 1
    assert ids(engine.generate(TEXTS, GREEDY)) == ids(waiting.generate(TEXTS, GREEDY))  # nothing is left behind


def test_random_tokens_are_those_of_the_seed(engine: Engine, waiting: Waiting) -> None:
    hot = [replace(GREEDY, temperature=1.3, top_k=50, top_p=0.95, seed=seed) for seed in range(3)]
    mixed = [*hot, GREEDY]
    found, counted = counts(engine, lambda: engine.generate(TEXTS, mixed))
    assert ids(found) == ids(waiting.generate(TEXTS, mixed))
    assert counted["ahead"] > 0
    assert len(set(ids(engine.generate(TEXTS[:1] * 3, hot)))) == 3


def test_logits_are_those_of_each_token(engine: Engine, waiting: Waiting) -> None:
    (found,), counted = counts(engine, lambda: engine.generate(TEXTS[:1], GREEDY, collect_logits=True))
    (expected,) = waiting.generate(TEXTS[:1], GREEDY, collect_logits=True)
    assert found.logits is not None and expected.logits is not None
    assert found.logits.equal(expected.logits)
    assert counted["ahead"] == 0  # the step behind would overwrite them


def test_requests_that_join_and_leave_in_between(engine: Engine, waiting: Waiting) -> None:
    expected = {text: waiting.generate([text], GREEDY)[0].token_ids for text in TEXTS}
    first = engine.add_request(TEXTS[0], GREEDY)
    aborted = engine.add_request(TEXTS[1], GREEDY)
    outputs: dict[int, list[int]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.token_ids)

    steps(4)
    engine.abort(aborted)
    joined = engine.add_request(TEXTS[2], GREEDY)
    steps(3)
    late = engine.add_request(TEXTS[3], GREEDY)
    while engine.has_unfinished:
        steps(1)
    for request, text in ((first, TEXTS[0]), (joined, TEXTS[2]), (late, TEXTS[3])):
        assert tuple(outputs[request]) == expected[text]
    assert tuple(outputs[aborted]) == expected[TEXTS[1]][: len(outputs[aborted])]
    assert engine.step() == []


def test_a_step_that_fails_is_computed_again(engine: Engine, waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = waiting.generate(TEXTS[:1], GREEDY)[0].token_ids
    request = engine.add_request(TEXTS[0], GREEDY)
    tokens: list[int] = []
    failed = 0
    take = engine._steps._read

    def tokens_or_error(*args: Any) -> list[int]:
        nonlocal failed
        failed += 1
        if failed % 3 == 0:
            raise RuntimeError("the device is away")
        return take(*args)

    monkeypatch.setattr(engine._steps, "_read", tokens_or_error)
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError:
            continue
        tokens += [token for output in outputs if output.request_id == request for token in output.token_ids]
    assert failed > 12 and tuple(tokens) == expected


def test_a_sequence_with_logprobs_is_not_run_ahead_of_and_the_rest_is(engine: Engine, waiting: Waiting) -> None:
    short = replace(GREEDY, max_new_tokens=5, frequency_penalty=0.7, min_tokens=2, logprobs=1)
    found, counted = counts(engine, lambda: engine.generate(TEXTS[:2], [short, GREEDY]))
    expected, _ = counts(waiting, lambda: waiting.generate(TEXTS[:2], [short, GREEDY]))
    assert ids(found) == ids(expected) and found[0].logprobs == expected[0].logprobs
    assert 0 < counted["ahead"] < counted["decode"] - 3  # once the short one has left
