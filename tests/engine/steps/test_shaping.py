"""Penalties, biases, min_p, min_tokens and log-probabilities: by their definitions, and in the engine's own steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from core.engine.steps.shaping import Row, shape
from core.errors import UsageError
from core.host.selection import select_device

PROMPT, ANSWER = [3, 5, 5, 9], [7, 5, 7, 7]
CONFIG = EngineConfig(max_num_seqs=3, max_model_len=64, options=CompileOptions(mode="off"))
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
PARAMS = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -0.3},
    "bias": {"logit_bias": ((8, 2.5), (9, -100.0), (8, 0.5))},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": ((4, 1.0),)},
}


def shaped(logits: Tensor, **fields: Any) -> Tensor:
    """Return one row shaped for a sequence of PROMPT and ANSWER, the last two of which are drafts."""
    params = SamplingParams(**fields)
    sequence = Sequence(0, PROMPT, params, generated=ANSWER[:2], stop_token_ids=frozenset({2, 11, 999}))
    return shape(logits.expand(3, -1), [Row(1, sequence, tuple(ANSWER[2:]))])[0]


def expected(logits: Tensor, prompt: list[int], answer: list[int], params: SamplingParams) -> Tensor:
    """Return a row shaped by the definitions, in plain Python."""
    row = logits.double().tolist()
    for token in {*prompt, *answer}:
        row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
    for token in set(answer):
        row[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for token, bias in params.logit_bias:
        row[token] += bias
    return torch.tensor(row, dtype=torch.float64)


@pytest.fixture
def logits() -> Tensor:
    """Twelve logits of both signs."""
    return torch.randn(12, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("fields", PARAMS.values(), ids=PARAMS)
def test_a_row_is_shaped_by_the_definitions(logits: Tensor, fields: Any) -> None:
    before = logits.clone()
    wanted = expected(logits, PROMPT, ANSWER, SamplingParams(**fields))
    torch.testing.assert_close(shaped(logits, **fields).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before) and not torch.allclose(wanted, before.double())


def test_the_repetition_penalty_is_transformers(logits: Tensor) -> None:
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    wanted = processor(torch.tensor([PROMPT + ANSWER]), logits[None].clone())[0]
    torch.testing.assert_close(shaped(logits, repetition_penalty=1.7), wanted)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(logits: Tensor, temperature: float, min_p: float) -> None:
    warper = MinPLogitsWarper(min_p)
    wanted = warper(torch.tensor([PROMPT]), (logits / temperature)[None])[0].isfinite()
    found = shaped(logits, min_p=min_p, temperature=temperature).isfinite()
    assert torch.equal(found, wanted) and 1 <= int(wanted.sum()) < 12
    assert torch.equal(shaped(logits, min_p=min_p), logits)  # a greedy row has nothing to drop


def test_no_end_comes_before_min_tokens(logits: Tensor) -> None:
    held = shaped(logits, min_tokens=5)
    assert held[[2, 11]].tolist() == [-math.inf] * 2 and held.isfinite().sum() == 10
    assert torch.equal(shaped(logits, min_tokens=4), logits)  # the drafts count


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "speculative"])
def engine(request: Any) -> Iterator[Engine]:
    """A tiny model with random weights, with and without drafts."""
    device = select_device("cpu")
    loaded = build_model(tiny_config("llama"), torch_device=device.torch_device, dtype=torch.float32)
    with Engine(loaded, device, replace(CONFIG, speculative=request.param)) as engine:
        yield engine


def check(completion: Completion, params: SamplingParams) -> None:
    """Hold each token against the model's logits, shaped by what went before it."""
    assert completion.logits is not None
    prompt, answer = list(completion.prompt_token_ids), list(completion.token_ids)
    for index, token in enumerate(answer):
        row = expected(completion.logits[index], prompt, answer[:index], params)
        assert row[token] >= row.max() - 1e-4, f"token {index}"


@pytest.mark.cases(2)
@pytest.mark.parametrize("fields", PARAMS.values(), ids=PARAMS)
def test_the_engine_chooses_from_shaped_logits_and_leaves_its_mates_alone(engine: Engine, fields: Any) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7], [9, 8, 7, 6]]
    plain = [each.token_ids for each in engine.generate(prompts, GREEDY)]
    params = replace(GREEDY, **fields)
    before = engine.stats().sampled_outside
    found = engine.generate(prompts, [params, GREEDY, params], collect_logits=True)
    check(found[0], params)
    check(found[2], params)
    assert found[1].token_ids == plain[1]
    assert engine.stats().sampled_outside - before >= 32
    assert [found[0].token_ids, found[2].token_ids] != [plain[0], plain[2]]


def test_min_tokens_holds_an_end_back_in_the_engine(engine: Engine) -> None:
    (plain,) = engine.generate([[5, 6, 7]], GREEDY)
    ends = replace(GREEDY, stop_token_ids=plain.token_ids[:1])
    assert len(engine.generate([[5, 6, 7]], ends)[0].token_ids) == 1
    (held,) = engine.generate([[5, 6, 7]], replace(ends, min_tokens=6), collect_logits=True)
    before = engine.stats().sampled_outside
    engine.generate([[5, 6, 7]], replace(GREEDY, min_tokens=6))
    assert 6 <= engine.stats().sampled_outside - before < 16  # and no longer
    assert len(held.token_ids) >= 6 and not {*held.token_ids[:5]} & {*ends.stop_token_ids}


@pytest.mark.cases(1)
def test_min_p_of_one_takes_the_most_likely_however_hot(engine: Engine) -> None:
    (plain,) = engine.generate([[5, 6, 7]], GREEDY)
    hot = replace(GREEDY, temperature=2.0, seed=1)
    assert engine.generate([[5, 6, 7]], hot)[0].token_ids != plain.token_ids
    assert engine.generate([[5, 6, 7]], replace(hot, min_p=1.0))[0].token_ids == plain.token_ids


@pytest.mark.cases(2)
@pytest.mark.parametrize("hot", [False, True])
def test_logprobs_are_the_models_and_change_no_token(engine: Engine, hot: bool) -> None:
    params = replace(GREEDY, temperature=1.5, seed=4) if hot else GREEDY
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7]]
    plain = engine.generate(prompts, params)
    found = engine.generate(prompts, [replace(params, logprobs=3), params], collect_logits=True)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert found[1].logprobs is None and found[0].logprobs is not None and found[0].logits is not None
    assert len(found[0].logprobs) == 16
    for each, token, logits in zip(found[0].logprobs, found[0].token_ids, found[0].logits, strict=True):
        logs = logits.double().log_softmax(-1)
        assert each.token_id == token and each.logprob == pytest.approx(float(logs[token]), abs=1e-4)
        assert len(each.top) == 3 and each.top[0][1] == pytest.approx(float(logs.max()), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx([float(logs[i]) for i, _ in each.top], abs=1e-4)


def test_outputs_of_steps_bring_the_logprobs_of_their_tokens(engine: Engine) -> None:
    request = engine.add_request([5, 6, 7], replace(GREEDY, logprobs=0))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert all(output.request_id == request and output.logprobs is not None for output in outputs)
    reported = [each for output in outputs for each in output.logprobs or ()]
    last = outputs[-1].completion
    assert last is not None and last.logprobs == tuple(reported)
    assert [each.token_id for each in reported] == list(last.token_ids) and {each.top for each in reported} == {()}


def test_a_bias_outside_of_the_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="logit_bias for token 99999"):
        engine.add_request([5, 6, 7], SamplingParams(logit_bias=((99999, 1.0),)))
    assert not engine.has_unfinished
