"""Tiny models that draft for each other, and the tokens of a sequence by a forward that has nothing of the engine."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sampling import make_generator, next_tokens, sampling_row
from core.engine.steps.sequence import Sequence as EngineSequence

VOCAB, MAX_LEN = 160, 48
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=MAX_LEN,
    block_size=4,
    cache_tokens=2 * MAX_LEN,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    speculative=3,
    options=CompileOptions(lowering="inline", strict=True, cache=False),
)


def tiny(model_type: str = "llama", seed: int = 0, **changes: Any) -> LoadedModel:
    config = tiny_config(model_type, **{"vocab_size": VOCAB, **changes})
    return build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32, seed=seed)


def nearly(loaded: LoadedModel, noise: float) -> LoadedModel:
    """Return a copy whose weights are a little different, so that some of its drafts are right."""
    model = copy.deepcopy(loaded.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return replace(loaded, model=model)


def own_tokens(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return what the served model's own forward gives after the prompt and after each but the last of these tokens."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.no_grad(), implementation(engine.loaded.model, engine.native_attention):
        logits = engine.loaded.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    numbers = EngineSequence(0, list(prompt), params, make_generator(params))
    rows = [sampling_row(params, 0.0 if params.greedy else numbers.uniform(i)) for i in range(len(tokens))]
    return next_tokens(logits, torch.tensor(rows), "random").tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Have tests of the module that imports this run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_failed_drafts_are_taken_again(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: list[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
    *,
    more_than: int,
) -> None:
    """Let three in ten steps of what drafts fail; every request gets the tokens of an engine without failures.

    more_than: failures there have to be.
    """
    expected = [each.token_ids for each in engine.generate(prompts, params)]
    drafts: Any = engine.drafter._runner  # type: ignore[attr-defined]
    run, rng, failures = drafts.run, random.Random(0), [0]

    def failing(step: Any, behind: Any = None) -> Any:
        if rng.random() < 0.3:
            failures[0] += 1
            raise RuntimeError("what drafts fails")
        return run(step, behind)

    monkeypatch.setattr(drafts, "run", failing)
    ids = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    tokens: dict[int, list[int]] = {index: [] for index in ids}
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError as error:
            assert str(error) == "what drafts fails"
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert failures[0] > more_than and [tuple(tokens[index]) for index in ids] == expected
