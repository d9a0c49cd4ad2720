"""Penalties, biases, min_p and min_tokens on the device: the tokens that the host's own account gives, whoever shares
the batch, with drafts, chunks, preemption and steps that are queued ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps import histories as histories_module
from core.engine.steps import penalties
from core.engine.steps import sequence as sequences
from core.engine.steps.histories import Histories
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import NUM_SLOTS, Sequence
from core.engine.steps.step import Part, Step
from core.errors import ModelError
from tests.recording import acme

GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)
HEAVY = replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.8)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7], [9, 8, 7, 6] * 6, [11, 12], [5, 6, 7, 5, 6, 7, 5, 6] * 3]
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=64,
    block_size=4,
    decode_buckets=(1, 3),
    prefill_buckets=(16,),
    cache_tokens=76,
    run_ahead=True,
    options=CompileOptions(lowering="inline", passes=()),
)
KINDS: dict[str, dict[str, Any]] = {
    "in the graph": {"sampling": ("greedy", "shaped")},
    "behind the graph": {"sampling": ("greedy", "random")},
    "with drafts": {"sampling": ("greedy", "shaped"), "speculative": 2},
    "without graphs": {"sampling": ("greedy", "shaped"), "options": CompileOptions(mode="off")},
}


def params_of(name: str) -> Any:
    """Return a kind as a parameter; what is captured is slow."""
    return pytest.param(KINDS[name], id=name, marks=() if name == "without graphs" else pytest.mark.slow)


@pytest.fixture(scope="module", params=[params_of(name) for name in KINDS])
def engine(request: Any) -> Iterator[Engine]:
    """A tiny model on a device that replays what it recorded, with a cache too small for three long sequences."""
    loaded = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with Engine(loaded, acme(), replace(CONFIG, **request.param)) as engine:
        assert engine.route == "paged"
        yield engine


@contextmanager
def on_the_host() -> Iterator[None]:
    """Have the host shape all logits: the device has no slots for what a sequence asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "NUM_SLOTS", -1)
        yield


def drawn(random: Random) -> SamplingParams:
    """Return any parameters, often of several kinds at once."""
    fields: dict[str, Any] = {
        "max_new_tokens": random.randint(4, 36),
        "ignore_eos": True,
        "priority": random.randint(-1, 1),
    }
    wishes: dict[str, Any] = {
        "repetition_penalty": random.uniform(0.7, 2.0),
        "presence_penalty": random.uniform(-1, 2),
        "frequency_penalty": random.uniform(-0.5, 2),
        "logit_bias": tuple((random.randrange(64), random.uniform(-4, 4)) for _ in range(random.randint(1, 8))),
    }
    fields |= {name: value for name, value in wishes.items() if random.random() < 0.5}
    if random.random() < 0.4:
        stops = tuple(random.sample(range(64), 24))
        fields |= {"stop_token_ids": stops, "min_tokens": random.randint(1, 8)}
    if random.random() < 0.5:
        fields |= {"temperature": random.uniform(0.5, 1.5), "seed": random.randrange(99), "min_p": random.random() / 3}
    return SamplingParams(**fields)


@pytest.mark.slow
def test_tokens_are_those_of_the_hosts_account_for_any_parameters(engine: Engine) -> None:
    random, before = Random(7), engine.stats()
    for _ in range(6):
        params = [drawn(random) for _ in PROMPTS]
        found = [each.token_ids for each in engine.generate(PROMPTS, params)]
        between = engine.stats()
        with on_the_host():
            expected = [each.token_ids for each in engine.generate(PROMPTS, params)]
        assert found == expected, params
    assert between.preempted > before.preempted and between.reused > before.reused


def test_a_heavy_penalty_gives_the_hosts_tokens_and_leaves_its_mates_alone(engine: Engine) -> None:
    plain = [each.token_ids for each in engine.generate(PROMPTS[:3], GREEDY)]
    found = [each.token_ids for each in engine.generate(PROMPTS[:3], [HEAVY, GREEDY, HEAVY])]
    with on_the_host():
        expected = [each.token_ids for each in engine.generate(PROMPTS[:3], [HEAVY, GREEDY, HEAVY])]
    assert found == expected and found[1] == plain[1] and found[0] != plain[0] and found[2] != plain[2]


def test_steps_with_penalties_are_queued_ahead_and_only_grammars_and_many_biases_wait(engine: Engine) -> None:
    if not engine.runs_ahead or "off" in engine.report().modes.values():
        pytest.skip("with drafts, and without graphs, no step is queued ahead")
    many = tuple((token, 0.0) for token in range(NUM_SLOTS + 1))
    ahead = []
    for params in (HEAVY, replace(GREEDY, logit_bias=many[:-1]), replace(GREEDY, logit_bias=many)):
        before = engine.stats().ahead
        engine.generate(PROMPTS[:1], params)
        ahead.append(engine.stats().ahead - before)
    assert ahead == [13, 13, 0]


def test_what_the_graph_shapes_is_not_counted_as_sampled_outside(engine: Engine) -> None:
    before = engine.stats().sampled_outside
    engine.generate(PROMPTS[:1], HEAVY)
    inside = "shaped" in engine.config.sampling
    assert engine.stats().sampled_outside - before == (1 if inside else 14)  # the first one is of the prefill


def test_a_step_that_failed_is_shaped_by_what_came_before_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = engine.generate(PROMPTS[:1], HEAVY)
    request, failed, take, tokens = engine.add_request(PROMPTS[0], HEAVY), 0, engine._steps._read, list[int]()

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
    assert failed > 4 and tuple(tokens) == expected.token_ids


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("the card has\n  no more")


def test_a_step_that_ran_out_of_memory_for_a_row_loses_no_request_and_no_rule(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [HEAVY, GREEDY, replace(HEAVY, logit_bias=((7, 3.0),))]
    expected = [done.token_ids for done in engine.generate(PROMPTS[:3], params)]
    requests = [engine.add_request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=False)]
    found: dict[int, list[int]] = {request: [] for request in requests}
    for name in ("rules_row", "least_share"):
        with monkeypatch.context() as planted:
            planted.setattr(histories_module, name, out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert [tuple(tokens) for tokens in found.values()] == expected


def test_a_device_without_room_for_the_histories_is_one_error_and_the_model_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32)
    before, config = loaded.config._attn_implementation, replace(CONFIG, **KINDS["without graphs"])
    with monkeypatch.context() as planted:
        planted.setattr(torch.Tensor, "repeat", out_of_memory)
        with pytest.raises(ModelError) as caught:
            Engine(loaded, acme(), config)
    error = caught.value
    # Four sequences, null row included, of 64 tokens and 101 rules.
    assert error.asked == "2640 bytes for the penalties of 3 sequences of 64 tokens"
    assert error.found == "the memory of cpu ran out: the card has no more" and "max_num_seqs" in error.remedy
    assert loaded.config._attn_implementation == before
    with Engine(loaded, acme(), config) as engine:
        assert len(engine.generate(PROMPTS[:1], HEAVY)[0].token_ids) == 14


def part(index: int, prompt: list[int]) -> Part:
    """Return the first part of a sequence with a penalty."""
    return Part(Sequence(index, prompt, HEAVY), len(prompt))


def test_a_row_is_its_sequences_until_another_one_needs_it() -> None:
    histories = Histories(2, 16, torch.device("cpu"))
    first, second, third = part(4, [1, 2]), part(7, [3]), part(9, [5, 6, 7])
    assert histories.rows_of(Step("prefill", (first, second))).tolist() == [1, 1, 2]
    assert histories.rows_of(Step("prefill", (first,))).tolist() == [1, 1]
    plain = Part(Sequence(8, [4], GREEDY), 1)
    assert histories.rows_of(Step("prefill", (plain, third))).tolist() == [0, 2, 2, 2]  # used longest ago
    second.sequence.generated, second.sequence.num_computed = [8], 1
    again = Step("decode", (Part(second.sequence, 1), Part(third.sequence, 3)))
    assert histories.rows_of(again).tolist() == [1, 2, 2, 2]
    assert histories.tokens[1, :1].tolist() == [3] and second.sequence.num_noted == 1  # brought from the host


def test_a_row_that_could_not_be_written_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = Histories(2, 16, torch.device("cpu"))
    first, second = part(4, [1, 2]), part(7, [3])
    third = Part(Sequence(9, [5, 6, 7], replace(HEAVY, logit_bias=((7, 3.0),))), 3)
    assert histories.rows_of(Step("prefill", (first, second))).tolist() == [1, 1, 2]
    with monkeypatch.context() as planted:
        planted.setattr(histories_module, "rules_row", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            histories.rows_of(Step("prefill", (third,)))
    assert histories.rows_of(Step("prefill", (second, third))).tolist() == [2, 1, 1, 1]
    assert histories.rules[1, :-1].tolist() == pytest.approx(penalties.rules_row(third.sequence, NUM_SLOTS))
    assert histories.rows_of(Step("prefill", (first, third))).tolist() == [2, 2, 1, 1, 1]  # second's


def test_what_a_failed_step_noted_counts_no_more() -> None:
    sequence = Sequence(0, [1, 2, 3], HEAVY, num_noted=9)
    sequence.num_computed = 2
    Part(sequence, 1).undone()
    assert sequence.num_noted == 2
