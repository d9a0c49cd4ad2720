"""Comparing with eager: what passes, what a planted fault looks like, and what a mismatch says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.engine.check import comparison as check
from core.engine.check.comparison import Comparison, compare
from core.engine.check.eager import eager_generate, forward_logits_of, fp64_logits
from core.engine.inspect.probe import counts_from_zero
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model, load_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device

CPU = torch.device("cpu")
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])
SIZES = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    decode_buckets=(2,),
    prefill_buckets=(32,),
    sampling=("greedy",),
    options=CompileOptions(lowering="inline"),
)


def tiny(model_type: str, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny("llama"), select_device("cpu"), SIZES) as engine:
        yield engine


@pytest.mark.slow
def test_the_embedded_model_passes() -> None:
    with Engine.load(embedded_model(), "cpu", SIZES) as engine:
        result = compare(engine, PROMPTS, num_tokens=16, rounds=2)
    assert result.tokens_equal and result.passed and not result.mismatch and not result.skipped
    assert (result.num_tokens, result.rounds) == (32, 2)
    assert result.verdict is not None
    assert result.verdict.passed
    assert result.verdict.num_elements == 32 * 2048
    assert 0 < result.verdict.eager_max_error < 1e-3
    assert result.eager_tokens_per_s > 0 < result.compiled_tokens_per_s


def test_without_an_oracle_the_reason_stands_there(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compare(engine, PROMPTS, num_tokens=4, rounds=1, oracle=False)
    assert result.verdict is None and result.passed
    assert "no fp64 reference for 0.0 billion parameters unless asked for" in result.skipped
    monkeypatch.setattr(check, "MAX_ORACLE_PARAMETERS", 10)
    assert compare(engine, PROMPTS, num_tokens=4, rounds=1).verdict is None
    assert compare(engine, PROMPTS, num_tokens=4, rounds=1, oracle=True).verdict is not None


def against(other: Any) -> Comparison:
    """Compare eager generation of a model with the compiled programs of another one, which may be spoilt."""
    config = replace(SIZES, options=CompileOptions(mode="off"))
    with Engine(tiny("llama"), select_device("cpu"), config) as compiled:
        swap(compiled, other)
        try:
            return compare(compiled, PROMPTS, num_tokens=16, rounds=1)
        finally:
            swap(compiled, other)


def swap(one: Engine, other: Engine) -> None:
    """Let each engine run the other's programs."""
    for name in ("_runner", "_scheduler", "_steps"):
        mine, theirs = getattr(one, name), getattr(other, name)
        setattr(one, name, theirs)
        setattr(other, name, mine)


@contextmanager
def planted(weight: Tensor, change: Callable[[Tensor], object]) -> Iterator[None]:
    """Change a weight in place, and put it back: an engine's programs read it there."""
    before = weight.clone()
    change(weight)
    try:
        yield
    finally:
        weight.copy_(before)


@pytest.mark.slow
def test_an_unchanged_copy_passes(engine: Engine) -> None:
    assert against(engine).passed


def fails(result: Comparison) -> bool:
    assert result.verdict is not None
    assert not result.verdict.passed
    return not result.passed and "error over bound" in result.verdict.reason


@pytest.mark.slow
def test_a_planted_fault_fails_the_criterion(engine: Engine) -> None:
    with planted(engine.loaded.model.model.layers[1].mlp.down_proj.weight, lambda weight: weight[3, 5].add_(0.001)):
        assert fails(against(engine))


def _eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-5


def _scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 1.001


@pytest.mark.slow
@pytest.mark.parametrize("change", [_eps, _scale])
def test_a_planted_fault_of_a_constant_fails_the_criterion(change: Any) -> None:
    other = tiny("llama")
    change(other.model)
    with Engine(other, select_device("cpu"), SIZES) as faulty:
        assert fails(against(faulty))


@pytest.mark.slow
def test_a_wrong_token_is_named_with_its_margin(engine: Engine) -> None:
    with planted(engine.loaded.model.lm_head.weight, lambda head: head.copy_(head.roll(1, 0))):
        result = against(engine)
    assert not result.tokens_equal and not result.passed
    assert result.mismatch.startswith("prompt 0, token 0: ")
    assert "fp64 margin" in result.mismatch


def test_a_mismatch_is_allowed_where_fp64_sees_a_tie() -> None:
    logits = [torch.tensor([[0.0, 1.0, 1.0 + 1e-6]])]
    exact = [torch.tensor([[0.0, 1.0 + 1e-6, 1.0]], dtype=torch.float64)]
    text, allowed = check._mismatch([[2]], [[1]], logits, exact)
    assert allowed and "prompt 0, token 0: 2, eager 1" in text
    clear = [torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)]
    assert not check._mismatch([[2]], [[1]], [clear[0].float()], clear)[1]
    assert check._mismatch([[2]], [[1]], logits, None) == ("prompt 0, token 0: 2, eager 1", None)
    assert check._mismatch([[2]], [[2]], logits, exact) == ("", False)


def test_eager_that_is_another_function_is_no_yardstick(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> list[torch.Tensor]:
        return [reference * 1.01 for reference in fp64_logits(*arguments)]

    monkeypatch.setattr(check, "fp64_logits", other)
    result = compare(engine, PROMPTS, num_tokens=4, rounds=1)
    assert result.verdict is None
    assert "eager generation itself differs from the fp64 forward by 0.0099" in result.skipped


def test_passed_takes_tokens_and_verdict_together(engine: Engine) -> None:
    good = compare(engine, PROMPTS, num_tokens=4, rounds=1)
    assert good.verdict is not None
    assert not replace(good, tokens_equal=False).passed
    assert replace(good, tokens_equal=False, mismatch_allowed=True).passed
    assert not replace(good, verdict=replace(good.verdict, passed=False)).passed


def test_the_attention_of_the_engine_is_there_again_after_a_check(engine: Engine) -> None:
    assert engine.loaded.config._attn_implementation == "core"


# Cache objects, recurrent state, tensors of its own, and no cache at all.
@pytest.mark.cases(3)
@pytest.mark.parametrize("model_type", ["llama", "mamba", "rwkv", "openai-gpt", "camembert"])
def test_eager_generation_is_the_models_own_forward(model_type: str) -> None:
    loaded = tiny(model_type)
    model = loaded.model
    with torch.no_grad():
        positions = counts_from_zero(model)
        tokens, logits = eager_generate(model, [PROMPTS[0]], 12, positions=positions)
        ids = torch.tensor([PROMPTS[0] + tokens[0][:-1]])
        whole = model(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(logits[0], whole, rtol=0, atol=1e-4)
    assert logits[0].argmax(-1).tolist() == tokens[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("model_type", ["xlm", "xlnet"])
def test_eager_generation_is_transformers_own_where_it_adds_a_token(model_type: str) -> None:
    model, prompts = tiny(model_type).model, [PROMPTS[0], PROMPTS[0][:3]]
    with torch.no_grad():
        tokens, logits = eager_generate(model, prompts, 5, positions=False)
        for index, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            how: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
            how |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
            own = model.generate(ids, max_new_tokens=5, **how)
            assert own.sequences[0, len(prompt) :].tolist() == tokens[index]
            torch.testing.assert_close(logits[index], torch.cat(own.logits), rtol=0, atol=1e-5)
            (whole,) = forward_logits_of(model, [prompt], [tokens[index]])
            torch.testing.assert_close(logits[index], whole, rtol=0, atol=1e-5)
        assert eager_generate(model, prompts, 5, positions=False, given=[[1] * 5, [2] * 5])[0] == [[1] * 5, [2] * 5]


def test_prompts_are_padded_on_the_left_and_come_out_the_same() -> None:
    loaded = tiny("llama")
    with torch.no_grad():
        tokens, _ = eager_generate(loaded.model, PROMPTS, 12, positions=True)
        alone = [eager_generate(loaded.model, [p], 12, positions=True)[0][0] for p in PROMPTS]
    assert tokens == alone


def test_the_reference_is_fp64_all_the_way() -> None:
    loaded = load_model(embedded_model(), torch_device=CPU)
    tokens = [[5, 6, 7]]
    (reference,) = fp64_logits(loaded.model, [PROMPTS[0]], tokens, "sdpa")
    (other,) = fp64_logits(loaded.model, [PROMPTS[0]], tokens, "eager")
    assert reference.dtype == torch.float64
    assert reference.shape == (3, 2048)
    assert float((reference - other).abs().max()) < 1e-11
    assert next(loaded.model.parameters()).dtype == torch.float32
