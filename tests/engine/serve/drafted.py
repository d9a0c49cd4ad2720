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

EAGER = replace(CONFIG, options=replace(CONFIG.options, mode="off"))
GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.7, seed=3)
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17], [40]]


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


def quick(count: int, *, of: int) -> list[Any]:
    """Return that many seeds as parameters, of which the first few are drawn by `make test` too."""
    return [pytest.param(seed, marks=() if seed < count else pytest.mark.exhaustive) for seed in range(of)]


def serve_all_kinds(engine: Engine, at_least: int = 1) -> None:
    """Serve schedules until some preempt, share beginnings, mix prompts with decoding, cut prompts: 4 have to do.

    at_least: schedules to serve in any case.
    """
    before = engine.stats()
    for seed in range(100, 104):
        serve(engine, random.Random(seed))
        after = engine.stats()
        kinds = ("preempted", "reused", "mixed_steps", "chunked")
        missing = [name for name in kinds if getattr(after, name) == getattr(before, name)]
        if not missing and seed >= 99 + at_least:
            return
    assert not missing


def assert_nothing_held(engine: Engine) -> None:
    """Assert that no sequence holds a block of the cache any more, and that the drafter follows none."""
    pools = engine._runner.cache.pools  # type: ignore[attr-defined]
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools)
    assert not engine.drafter._followers  # type: ignore[attr-defined]
