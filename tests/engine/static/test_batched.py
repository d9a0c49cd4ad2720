"""The engine on rows of the static cache: requests that come and go get what the model gives each of them alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.check.eager import eager_generate
from core.engine.config import SamplingParams
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.probe import counts_from_zero
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve import route
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.static.runner import StaticRunner
from core.engine.steps.runner import EngineConfig
from core.errors import CaptureError
from core.host.selection import select_device
from tests.installed import needs_static_cache

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=48, options=CompileOptions(lowering="inline", mode="off"))
LENGTHS = ((11, 6), (3, 12), (17, 3), (5, 9), (1, 14), (9, 2), (4, 7), (13, 5))
"""Of each request, tokens of the prompt and new tokens."""
PROMPTS = [[3 + 5 * index + 7 * i for i in range(length)] for index, (length, _) in enumerate(LENGTHS)]


@pytest.fixture(autouse=True, scope="module")
def unpaged() -> Iterator[None]:
    """Serve on the static cache what the paged one takes too: more kinds of models are tried on its rows so."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotPageable("asked for by the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "PagedRunner", refuse)
        yield


def tiny(model_type: str) -> Any:
    needs_static_cache(model_type)
    return build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=torch.float32)


def params(number: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=LENGTHS[number][1], ignore_eos=True, logprobs=1, **more)


@torch.no_grad()
def alone(model: Any, number: int) -> tuple[list[int], list[float]]:
    """Return the tokens that the model generates for one prompt by itself, and their log-probabilities."""
    positions = counts_from_zero(model)
    (tokens,), (logits,) = eager_generate(model, [PROMPTS[number]], LENGTHS[number][1], positions=positions)
    logprobs = logits.float().log_softmax(-1)
    return tokens, [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]


def is_as_alone(model: Any, number: int, completion: Completion) -> bool:
    tokens, logprobs = alone(model, number)
    count = len(completion.token_ids)
    assert completion.logprobs is not None
    got = torch.tensor([each.logprob for each in completion.logprobs])
    torch.testing.assert_close(got, torch.tensor(logprobs[:count]), rtol=1e-4, atol=1e-4)
    return list(completion.token_ids) == tokens[:count]


def run_staggered(engine: Engine) -> dict[int, Completion]:
    """Serve 8 requests that arrive over several steps, of which one is aborted while it runs and one while it waits."""
    ids: dict[int, int] = {}
    found: dict[int, Completion] = {}
    arrivals = {0: (0, 1), 2: (2,), 3: (3, 4, 5), 7: (6, 7)}
    step = 0
    while step < 8 or engine.has_unfinished:
        for number in arrivals.get(step, ()):
            ids[engine.add_request(PROMPTS[number], params(number))] = number
        if step == 5:  # the second generates, the fifth waits
            for number in (1, 4):
                completion = engine.abort(next(each for each, which in ids.items() if which == number))
                assert completion is not None and completion.finish_reason == "abort"
                found[number] = completion
        for output in engine.step():
            if output.completion is not None:
                found[ids[output.request_id]] = output.completion
        step += 1
    return found


def is_right(engine: Engine, model: Any) -> bool:
    assert engine.route == "static" and "; up to 4 sequences at once" in engine.route_reason
    found = run_staggered(engine)
    assert sorted(found) == list(range(len(PROMPTS)))
    assert len(found[1].token_ids) in range(1, LENGTHS[1][1]) and not found[4].token_ids
    kept = {number: completion for number, completion in found.items() if completion.token_ids}
    assert [len(found[number].token_ids) for number in (0, 2, 3, 5, 6, 7)] == [
        LENGTHS[number][1] for number in (0, 2, 3, 5, 6, 7)
    ]
    stats = engine.stats()
    assert stats.mixed_steps and stats.steps["decode"] < sum(count for _, count in LENGTHS) / 2  # they share steps
    return all(is_as_alone(model, number, completion) for number, completion in kept.items())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "model_type", ["bloom", "falcon", "mpt", "gptj", "llama4_text", "deepseek_v32", "diffllama", "xlm-roberta"]
)
def test_requests_that_come_and_go_get_what_each_gets_alone(model_type: str) -> None:
    loaded = tiny(model_type)
    with Engine(loaded, select_device("cpu"), CONFIG) as engine:
        assert is_right(engine, loaded.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["bloom", "falcon", "mpt", "gptj", "llama4_text", "deepseek_v32", "diffllama", "hrm_text"]
)
def test_compiled_decode_gives_the_same(model_type: str) -> None:
    loaded = tiny(model_type)
    config = replace(CONFIG, sampling=("greedy",), options=CompileOptions(lowering="inline", strict=True))
    with Engine(loaded, select_device("cpu"), config) as engine:
        assert is_right(engine, loaded.model)
        assert engine.report().modes == {"decode": "compile"} and not engine.report().fallbacks
        assert sorted({key.dims for key in engine._runner.program.keys}) == [(1,), (2,), (4,)]


@pytest.mark.slow
def test_one_large_bucket_serves_all_steps() -> None:
    loaded = tiny("gptj")
    options = CompileOptions(lowering="inline", strict=True)
    config = replace(CONFIG, sampling=("random",), decode_buckets=(4,), options=options)
    with Engine(loaded, select_device("cpu"), config) as engine:
        assert is_right(engine, loaded.model)
        assert {key.dims for key in engine._runner.program.keys} == {(4,)} and engine.stats().padded


@pytest.fixture(scope="module")
def gptj() -> Iterator[Engine]:
    with Engine(tiny("gptj"), select_device("cpu"), CONFIG) as engine:
        yield engine


def test_sequences_move_up_where_a_smaller_step_serves_them_then(gptj: Engine) -> None:
    runner = gptj._runner
    assert isinstance(runner, StaticRunner)
    requests = [gptj.add_request(PROMPTS[number], params(number)) for number in (0, 1, 3, 4)]
    for _ in range(3):
        gptj.step()
    before = gptj.stats().padded
    for request in requests[:3]:
        gptj.abort(request)
    gptj.step()
    assert [row for row, _ in runner.cache.holders] == [0] and gptj.stats().padded == before
    completions = [output.completion for _ in range(20) for output in gptj.step() if output.completion is not None]
    assert len(completions) == 1 and is_as_alone(gptj.loaded.model, 4, completions[0])


def test_sampled_tokens_do_not_depend_on_who_shares_the_batch(gptj: Engine) -> None:
    drawn = [SamplingParams(max_new_tokens=8, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(5)]
    by_itself = [gptj.generate([prompt], each)[0].token_ids for prompt, each in zip(PROMPTS, drawn, strict=False)]
    together = [completion.token_ids for completion in gptj.generate(PROMPTS[:5], drawn)]
    assert together == by_itself
    assert len(set(together)) == 5


def test_stop_strings_biases_and_streams_work_as_elsewhere(gptj: Engine) -> None:
    (free,) = gptj.generate([PROMPTS[0]], params(0))
    barred = free.token_ids[0]
    shaped = replace(params(0), logit_bias={barred: -100.0})
    stopped = replace(params(0), stop_token_ids=(free.token_ids[2],))
    biased, ended, plain = gptj.generate([PROMPTS[0]] * 3, [shaped, stopped, params(0)])
    assert barred not in biased.token_ids[:1]
    assert ended.finish_reason == "stop" and ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert plain.token_ids == free.token_ids


def test_a_step_that_failed_is_computed_again(gptj: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {gptj.add_request(PROMPTS[number], params(number)): number for number in (0, 3)}
    for _ in range(2):
        gptj.step()
    runner: Any = gptj._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run_decode", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            gptj.step()
    found = [output for _ in range(12) for output in gptj.step() if output.completion is not None]
    assert len(found) == 2 and gptj.stats().preempted == 0  # nothing that the cache holds was lost
    for output in found:
        assert output.completion is not None
        assert is_as_alone(gptj.loaded.model, requests[output.request_id], output.completion)


@pytest.mark.slow
def test_a_preempted_sequence_is_computed_again() -> None:
    loaded = tiny("gptj")
    with Engine(loaded, select_device("cpu"), CONFIG) as engine:
        engine.add_request(PROMPTS[3], params(3))
        for _ in range(4):
            engine.step()
        (sequence,) = engine._scheduler._running
        engine._scheduler._preempt(sequence)
        assert sequence.slot == 0
        completions = [out.completion for _ in range(12) for out in engine.step() if out.completion is not None]
        assert engine.stats().preempted == 1
        assert len(completions) == 1 and is_as_alone(loaded.model, 3, completions[0])


@pytest.mark.slow
def test_a_model_whose_rows_cannot_be_captured_runs_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by_ways = StaticRunner._compile_by_ways

    def fail_with_rows(self: StaticRunner, progress: Any) -> Any:
        if self._on_cache.rows is not None:
            raise CaptureError("capturing decode", found="no room for the graph", remedy="none")
        return compile_by_ways(self, progress)

    monkeypatch.setattr(StaticRunner, "_compile_by_ways", fail_with_rows)
    loaded = tiny("gptj")
    with Engine(loaded, select_device("cpu"), CONFIG) as engine:
        assert "one sequence at a time: its rows can't be captured: no room for the graph" in engine.route_reason
        assert all(is_as_alone(loaded.model, i, each) for i, each in enumerate(engine.generate(PROMPTS[:1], params(0))))


@pytest.mark.slow
def test_graphs_that_compute_something_else_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.engine.static import row_steps

    step = row_steps.RowStep
    written = step.written

    def written_wrongly(self: Any, whole: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
        return written(self, whole, 2 * new if torch.compiler.is_compiling() else new, dim)

    monkeypatch.setattr(step, "written", written_wrongly)
    loaded = tiny("gptj")
    with Engine(loaded, select_device("cpu"), replace(CONFIG, options=CompileOptions(lowering="inline"))) as engine:
        assert "one sequence at a time: its rows can't be captured: a short sequence in a row" in engine.route_reason
        assert engine.report().modes == {"decode": "compile"}
        assert is_as_alone(loaded.model, 0, engine.generate(PROMPTS[:1], params(0))[0])


@pytest.mark.slow
def test_one_that_stays_single_says_why() -> None:
    needs_static_cache("roformer")
    loaded = tiny("roformer")
    with Engine(loaded, select_device("cpu"), CONFIG) as engine:
        assert "; one sequence at a time: it computes something of the length of the cache" in engine.route_reason
        completions = engine.generate(PROMPTS[:3], [params(number) for number in range(3)])
        assert all(is_as_alone(loaded.model, number, each) for number, each in enumerate(completions))
        assert engine.stats().mixed_steps == 0
