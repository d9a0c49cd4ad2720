"""Continuous batching as a whole: requests come and go while others run, and each gets its own tokens exactly.

The reference has nothing of the engine: the model's own forward over prompt and tokens, without a cache, alone. If each
token is what that forward gives after all before it, the tokens are those of generating alone.

On the recording device, whose graphs replay what was captured and nothing else: decode and verify whole, prefill in
pieces around attention.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.models.assets import embedded_model
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sampling import make_generator, next_tokens, sampling_row
from core.engine.steps.sequence import Sequence as EngineSequence
from core.errors import CaptureError, UsageError
from tests.recording import acme

NUM_REQUESTS = 200
MAX_LEN = 72
BUDGET = 40
CONFIG = EngineConfig(
    max_num_seqs=8,
    max_model_len=MAX_LEN,
    block_size=8,
    decode_buckets=(2, 8),
    prefill_buckets=(BUDGET,),
    speculative=3,
    options=CompileOptions(lowering="inline", strict=True),
)
TEXT = """Return a list of the names in the module. If the argument is a string, return it. The Python interpreter is a
program that reads a file and runs it, line by line. This class has a method of that name, and the method has an
argument of that name; if the argument is None, the method returns None. Return a list of the names, or None."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The embedded model with drafts and a small step budget, on one thread: tiny steps have nothing to share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Engine.load(embedded_model(), acme(), CONFIG, dtype=torch.float32) as engine:
            assert engine.route == "paged"
            assert engine.report().modes == {"decode": "full", "prefill": "piecewise", "verify": "full"}
            yield engine
    finally:
        torch.set_num_threads(num_threads)


@dataclass
class Job:
    """A prompt, how it is continued, and what the engine gave."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    completion: Completion | None = None


def jobs(engine: Engine, count: int, seed: int = 0) -> list[Job]:
    """Prompts of 1 to 60 tokens cut from a text, every third one sampled, most of them of free length."""
    rng = random.Random(seed)
    assert engine.loaded.tokenizer is not None
    text = engine.loaded.tokenizer(TEXT)["input_ids"]
    found = []
    for index in range(count):
        length = rng.choice([1, 2, 5, 9, 17, 33, 60])
        start = rng.randrange(len(text) - length)
        params = SamplingParams(max_new_tokens=rng.randint(1, 28), ignore_eos=rng.random() < 0.8)
        if index % 3 == 2:
            hot = {"temperature": rng.choice([0.3, 1.0]), "top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.9])}
            params = replace(params, seed=index, **hot)
        found.append(Job(text[start : start + length], params, []))
    return found


def repetitive(engine: Engine) -> list[int]:
    """A prompt that says the same twice, so that drafts come from it at once."""
    assert engine.loaded.tokenizer is not None
    return list(engine.loaded.tokenizer(TEXT)["input_ids"][:14] * 2)


def own_tokens(model: Any, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return what the model's own forward gives after the prompt and after each but the last of these tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    numbers = EngineSequence(0, list(prompt), params, make_generator(params))
    rows = [sampling_row(params, 0.0 if params.greedy else numbers.uniform(i)) for i in range(len(tokens))]
    return next_tokens(logits, torch.tensor(rows), "random").tolist()


def check(engine: Engine, jobs: Sequence[Job]) -> None:
    """Assert that each job got its own tokens, as many as it may have."""
    with implementation(engine.loaded.model, engine.native_attention):
        for job in jobs:
            assert job.completion is not None
            tokens = list(job.completion.token_ids)
            assert tokens == job.tokens  # what the steps gave, piece by piece
            assert tokens == own_tokens(engine.loaded.model, job.prompt, tokens, job.params)
            stopped = not job.params.ignore_eos and tokens[-1] in engine.loaded.stop_token_ids
            assert stopped or len(tokens) == min(job.params.max_new_tokens, MAX_LEN - len(job.prompt))
            assert job.completion.finish_reason == ("stop" if stopped else "length")


def run(engine: Engine, jobs: Sequence[Job], *, seed: int = 1) -> list[int]:
    """Add the jobs a few at a time while the engine runs; return how many ran at each step."""
    rng, coming, ids, running = random.Random(seed), list(jobs), dict[int, Job](), list[int]()
    while coming or engine.has_unfinished:
        for _ in range(rng.choice([0] * 12 + [1, 2, 3, 12])):
            if coming:
                job = coming.pop(0)
                ids[engine.add_request(job.prompt, job.params)] = job
        outputs = engine.step()
        running.append(engine._scheduler.num_running)
        for output in outputs:
            ids[output.request_id].tokens += output.token_ids
            ids[output.request_id].completion = output.completion
    return running


def free_blocks(engine: Engine) -> int:
    (pool,) = engine._runner.cache.pools  # type: ignore[attr-defined]
    return int(pool.num_free)


@pytest.mark.slow
def test_two_hundred_requests_get_the_tokens_of_each_alone(engine: Engine) -> None:
    before, free = engine.stats(), free_blocks(engine)
    work = jobs(engine, NUM_REQUESTS)
    running = run(engine, work)
    check(engine, work)
    stats = engine.stats()
    assert (stats.joined - before.joined, stats.ended - before.ended) == (NUM_REQUESTS, NUM_REQUESTS)
    assert max(running) == 8 and min(running[:-8]) < 8  # they came and went
    long = sum(len(job.prompt) > BUDGET for job in work)
    assert 0 < long <= stats.chunked - before.chunked < NUM_REQUESTS
    assert stats.mixed_steps - before.mixed_steps > 20
    assert 50 < (stats.accepted - before.accepted).total() < (stats.drafted - before.drafted).total()
    assert all(stats.steps[phase] > 5 for phase in ("prefill", "decode", "verify"))
    assert free_blocks(engine) == free
    assert sum(engine.report().replays.values()) == sum(stats.steps.values())
    assert not engine.report().fallbacks and not engine.report().compiles


@pytest.mark.slow
def test_a_seed_gives_its_tokens_alone_and_batched_with_drafts_and_without(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.4, seed=5, ignore_eos=True)
    prompt = repetitive(engine)
    before = engine.stats()
    (alone,) = engine.generate([prompt], params)
    assert engine.stats().accepted["ngram"] > before.accepted["ngram"]  # some of it was drafted
    batched = engine.generate([prompt] * 3 + [prompt[:7]], [params, replace(params, seed=6), params, params])
    assert batched[0].token_ids == batched[2].token_ids == alone.token_ids
    assert batched[1].token_ids != alone.token_ids
    engine._scheduler._num_drafts = 0
    try:
        (plain,) = engine.generate([prompt], params)
    finally:
        engine._scheduler._num_drafts = CONFIG.speculative
    assert plain.token_ids == alone.token_ids


def test_the_logits_of_accepted_drafts_are_those_of_the_model(engine: Engine) -> None:
    prompt = repetitive(engine)
    before = engine.stats()
    (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True), collect_logits=True)
    assert engine.stats().accepted["ngram"] > before.accepted["ngram"]
    assert completion.logits is not None and completion.logits.shape[0] == 40
    with torch.no_grad(), implementation(engine.loaded.model, engine.native_attention):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        expected = engine.loaded.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(completion.logits, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_stop_among_accepted_drafts_ends_the_sequence_there(engine: Engine) -> None:
    prompt, params = repetitive(engine), SamplingParams(max_new_tokens=40, ignore_eos=True)
    (whole,) = engine.generate([prompt], params)
    for token in sorted(set(whole.token_ids)):
        (cut,) = engine.generate([prompt], replace(params, stop_token_ids=(token,)))
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        assert cut.finish_reason == "stop"


def test_a_request_is_aborted_while_it_waits_runs_or_has_a_part_of_its_prompt(engine: Engine) -> None:
    free, before = free_blocks(engine), engine.stats()
    kept = jobs(engine, 6, seed=3)
    ids = {engine.add_request(job.prompt, job.params): job for job in kept[:3]}
    long = engine.add_request([7] * 60)
    late = [engine.add_request([9, 8, 7], SamplingParams(max_new_tokens=20)) for _ in range(8)]
    seen = set()

    def step() -> None:
        for output in engine.step():
            seen.add(output.request_id)
            if output.request_id in ids:
                ids[output.request_id].tokens += output.token_ids
                ids[output.request_id].completion = output.completion

    step()
    engine.abort(long)  # a step has no room for the three and all of it
    engine.abort(late[-1])
    step()
    ids |= {engine.add_request(job.prompt, job.params): job for job in kept[3:]}
    engine.abort(late[0])
    engine.abort(late[0])  # once more changes nothing
    while engine.has_unfinished:
        step()
    check(engine, kept)
    assert long not in seen and late[-1] not in seen and late[1] in seen
    # One of the late ones was aborted while it waited: who never joined does not leave.
    joined, ended = engine.stats().joined - before.joined, engine.stats().ended - before.ended
    assert joined == ended == 6 + 1 + 7
    assert free_blocks(engine) == free
    engine.abort(next(iter(ids)))  # it has ended long ago
    with pytest.raises(UsageError, match="abort request 100000"):
        engine.abort(100_000)


def test_generate_is_refused_while_requests_run_and_they_go_on(engine: Engine) -> None:
    (job,) = jobs(engine, 1, seed=4)
    request = engine.add_request(job.prompt, job.params)
    with pytest.raises(UsageError, match="1 requests of add_request are unfinished"):
        engine.generate([[5, 6]])
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id == request
            job.tokens += output.token_ids
            job.completion = output.completion
    check(engine, [job])
    assert engine.step() == []


@pytest.mark.slow
def test_a_step_that_fails_can_be_run_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    work = jobs(engine, 9, seed=5)
    ids = {engine.add_request(job.prompt, job.params): job for job in work}
    run_step, calls = engine._runner.run, list[int]()

    def failing(step: Any, behind: Any) -> Any:
        output = run_step(step, behind)
        calls.append(1)
        if len(calls) % 3 == 0:
            raise RuntimeError("the device is gone")  # after it has written to the cache
        return output

    monkeypatch.setattr(engine._runner, "run", failing)
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError:
            continue
        for output in outputs:
            ids[output.request_id].tokens += output.token_ids
            ids[output.request_id].completion = output.completion
    assert len(calls) > 9
    check(engine, work)


def test_each_phase_replays_graphs_of_its_own_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    run_step = engine._runner.run

    def recording(step: Any, behind: Any) -> Any:
        before = engine.report().replays
        output = run_step(step, behind)
        after = engine.report().replays
        seen.extend((step.phase, str(key)) for key in after if after[key] != before.get(key, 0))
        return output

    monkeypatch.setattr(engine._runner, "run", recording)
    hot = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    engine.generate([[5, 6, 7, 5, 6, 7]], SamplingParams(max_new_tokens=12, ignore_eos=True))
    engine.generate([[5]], SamplingParams(max_new_tokens=2))
    engine.generate([[5]], hot)
    # The first sampled token comes from the prefill.
    assert set(seen) == {
        ("prefill", "prefill[40, 8, 8]"),
        ("verify", "verify[8, 2, 8]"),
        ("decode", "decode[2, 2, 2, sampling=greedy]"),
        ("decode", "decode[2, 2, 2, sampling=random]"),
    }
    assert not engine.report().fallbacks


def test_a_graph_of_another_phase_is_wrong_for_a_verify_batch_or_too_small(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why phases are part of the key: sizes alone would let such a batch pass for decode."""
    runner: Any = engine._runner
    run_step, found = runner.run, dict[str, Any]()

    def forcing(step: Any, behind: Any) -> Any:
        right = run_step(step, behind)
        if step.phase == "verify":
            tensors = {**runner._tensors(step), "sampling_params": runner._greedy_rows[: step.num_rows]}
            tokens, logits = right.tokens.clone(), right.logits.clone()
            if step.num_rows <= CONFIG.max_num_seqs:
                # It fits into a graph that was captured for one token of each sequence.
                other, wrong = runner.program("decode", guards={"sampling": "greedy"}, **tensors)
                assert wrong.shape == logits.shape and not torch.allclose(wrong, logits, atol=1e-2)
                found["decode"] = other.tolist() != tokens.tolist() or found.get("decode")
            else:
                # Graphs of prefill give one row of each sequence, and none for its drafts.
                with pytest.raises(CaptureError, match="no bucket is that large"):
                    runner.program("prefill", guards={}, **tensors)
                found["prefill"] = True
        return run_step(step, behind)

    monkeypatch.setattr(runner, "run", forcing)
    for prompts in ([[5, 6, 7, 5, 6, 7]], [[5, 6, 7, 5, 6, 7]] * 4):
        engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert found == {"decode": True, "prefill": True}
