"""The static route: models with attention or state of their own, decode compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.check.comparison import compare
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.models.tiny_rules import WINDOW
from core.engine.serve.engine import Engine
from core.engine.static.runner import StaticRunner
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part, Step
from core.host.selection import select_device
from tests.installed import needs_static_cache

CPU = torch.device("cpu")
CONFIG = EngineConfig(
    max_num_seqs=4, max_model_len=48, sampling=("greedy",), options=CompileOptions(lowering="inline", strict=True)
)
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])
EAGER = replace(CONFIG, options=replace(CONFIG.options, mode="off"))


def tiny(model_type: str, **changes: Any) -> Any:
    needs_static_cache(model_type)
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def bloom() -> Iterator[Engine]:
    """An engine on a model with attention of its own."""
    with Engine(tiny("bloom"), select_device("cpu"), replace(CONFIG, sampling=("greedy", "random"))) as engine:
        yield engine


def is_static_and_right(engine: Engine) -> bool:
    assert engine.route == "static"
    assert engine.route_reason
    assert {trace.phase for trace in engine.report().traces} == {"decode"}
    result = compare(engine, PROMPTS, num_tokens=2 * WINDOW, rounds=1)
    assert result.tokens_equal, result.mismatch
    assert result.verdict is not None
    assert result.verdict.passed, result.verdict.reason
    return 0 < result.verdict.eager_max_error < 1e-4


def test_a_model_that_cannot_be_paged_runs_and_is_right(bloom: Engine) -> None:
    assert is_static_and_right(bloom)


# Positions counted behind attention of its own; attention twice in a layer.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["xglm", "diffllama"])
def test_others_that_cannot_be_paged_are_right(model_type: str) -> None:
    with Engine(tiny(model_type), select_device("cpu"), CONFIG) as engine:
        assert is_static_and_right(engine)


@pytest.mark.slow
def test_of_several_modes_it_takes_one_that_the_device_has() -> None:
    config = replace(CONFIG, options=CompileOptions(lowering="inline", mode=("full", "compile")))
    with Engine(tiny("bloom"), select_device("cpu"), config) as engine:
        assert (engine.route, engine.report().modes) == ("static", {"decode": "compile"})


def test_sequences_take_turns_and_do_not_see_each_other(bloom: Engine) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    alone = [bloom.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    together = bloom.generate([*PROMPTS, *PROMPTS], params)
    assert [c.token_ids for c in together] == alone + alone


@pytest.mark.slow
def test_a_window_is_kept_beyond_its_length() -> None:
    """transformers' own static layers with a window would repeat in each replay what they did when traced."""
    loaded = tiny("gemma3_text")
    runner = StaticRunner(loaded.model, select_device("cpu"), CONFIG, max_model_len=48, reason="asked for")
    sequence = Sequence(0, list(PROMPTS[1]), SamplingParams(max_new_tokens=30))
    assert runner.cache.join(sequence)
    first = runner.run(Step("prefill", (Part(sequence, len(sequence)),)))
    assert first is not None
    logits = [first.logits.clone()]
    for token in range(50, 50 + 2 * WINDOW):
        sequence.num_computed = len(sequence)
        sequence.generated.append(token)
        output = runner.run(Step("decode", (Part(sequence, 1),)))
        assert output is not None
        assert output.tokens.tolist() == output.logits.argmax(-1).tolist()
        logits.append(output.logits.clone())
    with torch.no_grad():
        ids = torch.tensor([sequence.prompt + sequence.generated])
        expected = loaded.model(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[1]) - 1 :]
    torch.testing.assert_close(torch.cat(logits), expected, rtol=0, atol=1e-4)
    runner.close()


def test_sampling_is_in_the_graph_of_decode_and_gives_the_tokens_of_sampling_outside(bloom: Engine) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=5, ignore_eos=True)

    def sampled(engine: Engine) -> tuple[list[int], int]:
        before = engine.stats().sampled_outside
        return engine.generate([PROMPTS[0]], params)[0].token_ids, engine.stats().sampled_outside - before

    inside, num_outside = sampled(bloom)
    assert num_outside == 1  # the first token comes from the prefill, which is eager
    with Engine(tiny("bloom"), select_device("cpu"), EAGER) as eager:
        assert sampled(eager) == (inside, 8)


def test_drafts_are_declined_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(CONFIG, speculative=3, options=replace(CONFIG.options, mode="off"))
    with caplog.at_level("WARNING"), Engine(tiny("bloom"), select_device("cpu"), config) as engine:
        engine.generate([[5, 6] * 8], SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert not engine.stats().drafted
    assert "no speculative decoding on transformers' static cache" in caplog.text


def test_one_sequence_holds_the_cache() -> None:
    alone = replace(EAGER, max_num_seqs=1)
    runner = StaticRunner(tiny("bloom").model, select_device("cpu"), alone, max_model_len=32, reason="asked for")
    first, second = (Sequence(i, [3, 4], SamplingParams()) for i in range(2))
    assert runner.cache.join(first)
    assert not runner.cache.join(second)
    runner.cache.release(first)
    assert runner.cache.join(second)
    assert (runner.max_num_seqs, runner.reason) == (1, "asked for")
    runner.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model_type", "found"),
    [("rwkv", "its forward takes no cache object"), ("gpt_neo", "it differs from its forward without a cache by")],
)
def test_a_model_without_a_static_cache_has_none_and_both_reasons(model_type: str, found: str) -> None:
    with Engine(tiny(model_type), select_device("cpu"), EAGER) as engine:
        assert engine.route == "recompute" and found in engine.route_reason
        assert "does not call transformers' attention interface" in engine.route_reason


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}


def test_a_table_chosen_by_the_longest_sequence_is_shared_by_nobody() -> None:
    """Rows would all turn by the long factors once one of them is beyond the border."""
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE}
    loaded = build_model(tiny_config("phi3", **sizes), torch_device=torch.device("cpu"), dtype=torch.float32)
    with Engine(loaded, select_device("cpu"), replace(EAGER, max_model_len=200)) as engine:
        assert engine.route == "static"
        assert "one sequence at a time: with rope type 'longrope'" in engine.route_reason
    with Engine(loaded, select_device("cpu"), replace(EAGER, max_model_len=120)) as engine:
        assert engine.route == "paged"
