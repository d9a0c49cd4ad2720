"""The engine without a cache: requests that come and go get what the model's own generation gives each of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.engine.check.comparison import compare
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.recompute import opening
from core.engine.recompute.model import Way
from core.engine.recompute.runner import RecomputeRunner
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from core.errors import CaptureError, ModelError, UsageError
from core.host.selection import select_device
from tests.marks import slow_except
from tests.support import refused

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=40, options=CompileOptions(lowering="inline", mode="off"))
LENGTHS = ((11, 6), (3, 12), (17, 3), (5, 9), (1, 14), (9, 2))
"""Of each request, tokens of the prompt and new tokens."""
PROMPTS = [[3 + 5 * index + 7 * i for i in range(length)] for index, (length, _) in enumerate(LENGTHS)]
ABORTED = {1: 5, 3: 6}
"""Requests that are aborted before that step."""
Hook = Callable[[Any, Any, Tensor], Tensor]


def tiny(model_type: str, hook: Hook | None = None) -> Any:
    """Return a tiny model; hook: changes what its table of tokens gives."""
    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=torch.float32)
    if hook is not None:
        loaded.model.get_input_embeddings().register_forward_hook(hook)
    return loaded


def params(number: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=LENGTHS[number][1], ignore_eos=True, logprobs=1, **more)


@torch.no_grad()
def is_as_alone(model: Any, number: int, completion: Completion) -> bool:
    """Compare with `generate` of transformers, tokens and log-probabilities."""
    count, ids = len(completion.token_ids), torch.tensor([PROMPTS[number]])
    how: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    how |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    own = model.generate(ids, max_new_tokens=count, **how)
    assert completion.logprobs is not None
    logprobs = torch.cat(own.logits).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor([completion.token_ids]).T)[:, 0]
    got = torch.tensor([each.logprob for each in completion.logprobs])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return list(completion.token_ids) == own.sequences[0, len(PROMPTS[number]) :].tolist()


def run_staggered(engine: Engine) -> dict[int, Completion]:
    """Serve 6 requests that arrive over several steps, of which two are aborted."""
    ids: dict[int, int] = {}
    found: dict[int, Completion] = {}
    arrivals = {0: (0, 1), 2: (2,), 3: (3, 4), 6: (5,)}
    step = 0
    while step < 7 or engine.has_unfinished:
        for number in arrivals.get(step, ()):
            ids[number] = engine.add_request(PROMPTS[number], params(number))
        for number in [each for each, when in ABORTED.items() if when == step]:
            completion = engine.abort(ids[number])
            assert completion is not None and completion.finish_reason == "abort"
            found[number] = completion
        for output in engine.step():
            if output.completion is not None:
                found[next(each for each, which in ids.items() if which == output.request_id)] = output.completion
        step += 1
    return found


def is_right(engine: Engine) -> bool:
    assert engine.route == "recompute" and "every step computes all tokens again" in engine.route_reason
    found = run_staggered(engine)
    assert sorted(found) == list(range(len(PROMPTS)))
    whole = [number for number in found if number not in ABORTED]
    assert [len(found[number].token_ids) for number in whole] == [LENGTHS[number][1] for number in whole]
    return all(is_as_alone(engine.loaded.model, number, each) for number, each in found.items() if each.token_ids)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model_type", slow_except(["openai-gpt", "rwkv", "gpt_neo", "xlm"], "openai-gpt", "rwkv"))
def test_requests_that_come_and_go_get_what_the_model_generates_alone(model_type: str) -> None:
    with Engine(tiny(model_type), select_device("cpu"), CONFIG) as engine:
        assert "; up to 4 sequences at once" in engine.route_reason
        # XLM adds a token behind the text, which has no place behind padding.
        assert ("; without padding, eagerly: " in engine.route_reason) == (model_type == "xlm")
        assert is_right(engine)
        stats = engine.stats()
        assert stats.mixed_steps and stats.steps["decode"] < sum(count for _, count in LENGTHS) / 2  # they share steps


@pytest.mark.slow  # where rows touch each other, which a hook does below, it is one at a time too
def test_xlnet_whose_causal_masks_fit_one_sequence_alone_has_one_at_a_time() -> None:
    with Engine(tiny("xlnet"), select_device("cpu"), CONFIG) as engine:
        assert "; one sequence at a time: RuntimeError: " in engine.route_reason
        assert "; without padding, eagerly: " in engine.route_reason
        assert is_right(engine) and engine.stats().mixed_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["openai-gpt", "gpt_neo"])
def test_compiled_forwards_give_the_same(model_type: str) -> None:
    options = CompileOptions(lowering="inline", strict=True)
    config = replace(CONFIG, sampling=("greedy",), decode_buckets=(1, 4), options=options)
    with Engine(tiny(model_type), select_device("cpu"), config) as engine:
        assert is_right(engine)
        report = engine.report()
        assert report.modes == {"decode": "compile"} and not report.fallbacks
        assert sorted({key.dims for key in engine._runner.program.keys}) == [(1, 32), (1, 40), (4, 32), (4, 40)]
        assert engine.stats().padded


@pytest.mark.slow
def test_a_loop_over_tokens_runs_eagerly_unless_graphs_are_asked_for() -> None:
    free = replace(CONFIG, options=CompileOptions(lowering="inline"))
    with Engine(tiny("rwkv"), "cpu", free) as engine:
        assert "; eagerly: its code loops over tokens, " in engine.route_reason
        assert engine.report().modes == {"decode": "off"}
    modes = list[Any]()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CaptureError, match="seen"):

        def compile_as(_self: RecomputeRunner, asked: Any, _progress: Any) -> None:
            modes.append(asked)
            raise CaptureError("compiling", found="seen", remedy="none")

        patch.setattr(RecomputeRunner, "_compile", compile_as)
        Engine(tiny("rwkv"), "cpu", replace(CONFIG, options=CompileOptions(mode="compile")))
    assert modes == [("compile",)]


def test_a_warning_says_once_why_and_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "core.engine"), Engine(tiny("openai-gpt"), "cpu", CONFIG) as engine:
        engine.generate(PROMPTS[:2], params(5))
    said = [record.getMessage() for record in caplog.records if "square of the length" in record.getMessage()]
    assert len(said) == 1
    for text in ("does not call transformers' attention interface", "its forward takes no cache object"):
        assert text in said[0] and text in engine.route_reason


def mixes_rows(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output + output.mean(dim=0, keepdim=True)


def looks_ahead(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output + output.mean(dim=1, keepdim=True)


@pytest.mark.slow
def test_a_model_whose_rows_touch_each_other_has_one_sequence_at_a_time() -> None:
    with Engine(tiny("openai-gpt", mixes_rows), "cpu", CONFIG) as engine:
        assert "; one sequence at a time: a sequence beside others differs" in engine.route_reason
        assert "without padding" not in engine.route_reason
        assert is_right(engine) and engine.stats().mixed_steps == 0


def test_a_model_that_padding_changes_runs_without_padding() -> None:
    with Engine(tiny("openai-gpt", looks_ahead), "cpu", CONFIG) as engine:
        assert (
            "; up to 4 sequences at once; without padding, eagerly: with it, a sequence differs" in engine.route_reason
        )
        assert is_right(engine) and engine.stats().padded == 0


@pytest.mark.slow
def test_a_model_that_the_longest_padding_changes_runs_without_padding() -> None:
    def by_length(_module: Any, inputs: Any, output: Tensor) -> Tensor:
        length = inputs[0].shape[-1]
        return output * (128 / length if length > 128 else 1)

    with Engine(tiny("gpt_neo", by_length), "cpu", replace(CONFIG, max_model_len=200)) as engine:
        assert "without padding, eagerly: with it, a sequence with all of its padding differs" in engine.route_reason
        assert is_right(engine)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model_type", ["openai-gpt", "xlm"])
def test_the_whole_context_is_served(model_type: str) -> None:
    """XLM is given one token more than it has, a place to predict."""
    loaded = tiny(model_type)
    with Engine(loaded, "cpu", replace(CONFIG, max_model_len=None)) as engine:
        longest = engine.max_model_len
        prompt = [3 + index % 50 for index in range(longest - 1)]
        (found,) = engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    ids = torch.tensor([prompt])
    own = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert list(found.token_ids) == own[0, longest - 1 :].tolist()


@pytest.mark.slow
def test_hashes_that_are_drawn_are_refused_where_they_divide_the_longest_sequence() -> None:
    with Engine(tiny("reformer"), "cpu", replace(CONFIG, max_model_len=64)) as engine:
        assert engine.route == "recompute"
    with refused(ModelError, "its forward on the same 255 tokens differs", "the second time"):
        Engine(tiny("reformer"), "cpu", replace(CONFIG, max_model_len=256))


def test_what_the_model_says_of_sampling_is_not_asked() -> None:
    loaded = tiny("openai-gpt")
    said = loaded.model.generation_config
    said.num_return_sequences, said.do_sample, said.stop_strings = 2, True, ["x"]
    with Engine(loaded, "cpu", CONFIG) as engine:
        assert engine.route == "recompute" and loaded.model.generation_config is said


def test_a_context_of_two_tokens_is_enough() -> None:
    with Engine(tiny("openai-gpt"), "cpu", replace(CONFIG, max_model_len=2)) as engine:
        (found,) = engine.generate([[5]], SamplingParams(max_new_tokens=1, ignore_eos=True))
        assert len(found.token_ids) == 1


def test_logits_are_of_last_tokens_alone_where_the_forward_can_be_told_so() -> None:
    loaded = tiny("openai-gpt")
    own = loaded.model.forward

    @functools.wraps(own)
    def ignoring(*args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    for is_told in (True, False):
        with Engine(loaded, "cpu", CONFIG) as engine:
            runner: Any = engine._runner
            assert runner._forward.way == Way(padded=True, masked=True, batched=True, last_only=is_told)
            assert all(
                is_as_alone(loaded.model, i, each) for i, each in enumerate(engine.generate(PROMPTS[:1], params(0)))
            )
        loaded.model.forward = ignoring


def test_without_padding_a_mode_that_was_asked_for_is_refused() -> None:
    config = replace(CONFIG, options=CompileOptions(mode="compile"))
    with pytest.raises(CaptureError, match="without padding, eagerly"):
        Engine(tiny("openai-gpt", looks_ahead), "cpu", config)


def test_a_model_that_gives_something_else_each_time_is_refused() -> None:
    noise = torch.Generator().manual_seed(0)

    def shakes(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output + torch.randn(output.shape, generator=noise)

    with pytest.raises(ModelError, match=r"can't be paged.*static cache fails.*whole sequences fails, too: its"):
        Engine(tiny("openai-gpt", shakes), "cpu", CONFIG)


def test_a_model_that_generates_something_else_is_refused() -> None:
    """On its own cache, the mean is that of the new token alone."""
    with pytest.raises(ModelError, match=r"whole sequences fails, too: its own generation differs .* by 0\.\d"):
        Engine(tiny("gpt_neo", looks_ahead), "cpu", CONFIG)


@pytest.mark.parametrize(
    ("changes", "asked"), [({"speculative": 2}, "speculative=2"), ({"cache_tokens": 99}, "cache_tokens=99")]
)
def test_what_needs_a_cache_is_refused_by_name(changes: dict[str, Any], asked: str) -> None:
    with pytest.raises(UsageError, match=rf"{asked}\n.*has no cache here"):
        Engine(tiny("openai-gpt"), "cpu", replace(CONFIG, **changes))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "num_ranks", lambda: 2)
    with pytest.raises(UsageError, match="2 processes that share the model"):
        opening.refuse_cached(tiny("openai-gpt").model, CONFIG, "why")


@pytest.fixture(scope="module")
def gpt() -> Iterator[Engine]:
    with Engine(tiny("openai-gpt"), "cpu", replace(CONFIG, run_ahead=True)) as engine:
        yield engine


def test_the_check_of_a_run_judges_it(gpt: Engine) -> None:
    result = compare(gpt, PROMPTS[:2], num_tokens=8, rounds=1)
    assert result.tokens_equal and result.verdict is not None and result.verdict.passed


def test_sampled_tokens_do_not_depend_on_who_shares_the_batch(gpt: Engine) -> None:
    drawn = [SamplingParams(max_new_tokens=8, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(5)]
    by_itself = [gpt.generate([prompt], each)[0].token_ids for prompt, each in zip(PROMPTS, drawn, strict=False)]
    together = [completion.token_ids for completion in gpt.generate(PROMPTS[:5], drawn)]
    assert together == by_itself and len(set(together)) == 5


def test_stop_tokens_biases_and_streams_work_as_elsewhere(gpt: Engine) -> None:
    (free,) = gpt.generate([PROMPTS[0]], params(0))
    shaped = replace(params(0), logit_bias={free.token_ids[0]: -100.0})
    stopped = replace(params(0), stop_token_ids=(free.token_ids[2],))
    biased, ended, plain = gpt.generate([PROMPTS[0]] * 3, [shaped, stopped, params(0)])
    assert free.token_ids[0] not in biased.token_ids[:1]
    assert ended.finish_reason == "stop" and ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert plain.token_ids == free.token_ids


def test_a_step_that_failed_is_computed_again(gpt: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt.add_request(PROMPTS[0], params(0))
    gpt.step()
    with monkeypatch.context() as patch:
        patch.setattr(gpt._runner, "_compute", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            gpt.step()
    (completion,) = [out.completion for _ in range(12) for out in gpt.step() if out.completion is not None]
    assert is_as_alone(gpt.loaded.model, 0, completion)


def test_calls_hold_what_fits_into_them(gpt: Engine) -> None:
    runner: Any = gpt._runner
    assert isinstance(runner, RecomputeRunner)
    assert runner._lengths == [32, 40] and runner._row_sizes == [1, 2, 4]
    sequences = [[1] * length for length in (40, 3, 33, 32, 35, 40)]
    assert list(runner._calls(sequences)) == [[1, 3], [0, 2, 4, 5]]
    runner._most_tokens, before = 100, runner._most_tokens
    assert list(runner._calls(sequences)) == [[1, 3], [0, 2], [4, 5]]
    runner._most_tokens = before
