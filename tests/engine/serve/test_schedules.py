"""Random schedules on a cache that is too small: joins, leaves, aborts, preemptions, shared beginnings, windows.

Each sequence must get the tokens of its prompt alone: those that the model's own forward gives, without any cache,
after the prompt and all tokens before. On the recording device, with steps begun before the last tokens are known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from tests.recording import acme

NUM_SCHEDULES, NUM_QUICK = 500, 6
MAX_LEN, BLOCK = 48, 4
CONFIG = EngineConfig(
    max_num_seqs=6,
    max_model_len=MAX_LEN,
    block_size=BLOCK,
    cache_tokens=2 * MAX_LEN,
    decode_buckets=(2, 6),
    prefill_buckets=(8, 20),
    run_ahead=True,
    sampling=("greedy",),
    options=CompileOptions(lowering="inline", strict=True),
)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "llama4_text"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The second has a layer with a window, whose blocks are given back, the third one with chunks, and another whose
    scores depend on the position."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = build_model(tiny_config(request.param), torch_device=torch.device("cpu"), dtype=torch.float32)
    with Engine(loaded, acme(), CONFIG) as engine:
        assert engine.route == "paged"
        yield engine
    torch.set_num_threads(threads)


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    completion: Completion | None = None


def draw(rng: random.Random, vocab_size: int) -> list[Job]:
    """Prompts that begin alike in part, so that some find their beginning in the cache."""
    beginnings = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 24))] for _ in range(3)]
    jobs = []
    for _ in range(rng.randint(4, 12)):
        beginning = rng.choice([[], *beginnings])
        prompt = [*beginning, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, 12)))][: MAX_LEN - 2]
        most = rng.randint(1, MAX_LEN - len(prompt))
        stop = tuple(rng.sample(range(vocab_size), 3)) if rng.random() < 0.2 else ()
        jobs.append(Job(prompt, SamplingParams(max_new_tokens=most, ignore_eos=True, stop_token_ids=stop)))
    return jobs


def serve(engine: Engine, jobs: list[Job], rng: random.Random) -> None:
    coming, running = list(jobs), dict[int, Job]()
    for _ in range(2000):
        while coming and rng.random() < 0.4:
            job = coming.pop(0)
            running[engine.add_request(job.prompt, job.params)] = job
        if engine._requests and rng.random() < 0.03:
            index = rng.choice(list(engine._requests))
            running[index].completion = engine.abort(index)
        for output in engine.step():
            running[output.request_id].tokens += output.token_ids
            running[output.request_id].completion = output.completion
        if not coming and not engine.has_unfinished:
            return
    raise AssertionError("some sequence starves")


def own_tokens(model: Any, job: Job) -> list[int]:
    ids = torch.tensor([[*job.prompt, *job.tokens[:-1]]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(job.prompt) - 1 :]
    return logits.argmax(-1).tolist()


SEEDS = [
    pytest.param(seed, marks=() if seed < NUM_QUICK else pytest.mark.exhaustive) for seed in range(NUM_SCHEDULES // 2)
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_prompt_gets_its_own_tokens_whatever_the_schedule(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    jobs = draw(rng, engine.loaded.vocab_size)
    serve(engine, jobs, rng)
    with implementation(engine.loaded.model, engine.native_attention):
        for job in jobs:
            assert job.completion is not None
            assert list(job.completion.token_ids) == job.tokens
            # Of the prompt alone, also where it was computed again with what it had generated.
            assert job.completion.num_cached_tokens in range(0, len(job.prompt), BLOCK)
            if job.tokens:
                assert job.tokens == own_tokens(engine.loaded.model, job)
            stopped = bool(job.tokens) and job.tokens[-1] in job.params.stop_token_ids
            wanted = "stop" if stopped else "length"
            assert job.completion.finish_reason in (wanted, "abort")
            if job.completion.finish_reason == "length":
                assert len(job.tokens) == job.params.max_new_tokens
    pools = engine._runner.cache.pools  # type: ignore[attr-defined]
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools)  # nobody holds a block any more


@pytest.mark.cases(1)
def test_the_schedules_have_what_they_are_for(engine: Engine) -> None:
    before, cached = engine.stats(), 0
    for seed in range(1000, 1006):
        rng = random.Random(seed)
        jobs = draw(rng, engine.loaded.vocab_size)
        serve(engine, jobs, rng)
        cached += sum(job.completion.num_cached_tokens for job in jobs if job.completion is not None)
    after = engine.stats()
    counts = Counter({name: getattr(after, name) - getattr(before, name) for name in ("preempted", "reused", "ahead")})
    counts["cached"] = cached
    assert min(counts.values()) > 0 and after.mixed_steps > before.mixed_steps, counts
    assert after.discarded > before.discarded
