"""A quantised cache: half the memory, scales from the model, and checks that know what rounding costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.compilation.options import CompileOptions
from core.engine.check.comparison import compare
from core.engine.config import SamplingParams
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.cache_codes import Rounding, amplification, calibrate, judge_rounded, layer_scales
from core.engine.inspect.probe import relative_difference
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, UsageError
from core.host.selection import select_device

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])
CONFIG = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    decode_buckets=(2,),
    prefill_buckets=(32,),
    sampling=("greedy",),
    kv_cache_dtype="fp8",
    options=CompileOptions(lowering="inline"),
)
EAGER = replace(CONFIG, options=CompileOptions(mode="off"))


def tiny(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=dtype)


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny("llama", torch.bfloat16), select_device("cpu"), CONFIG) as engine:
        yield engine


@pytest.mark.slow
def test_the_cache_takes_half_the_memory_of_half_precision(engine: Engine) -> None:
    runner: Any = engine._runner
    assert {tensor.dtype for tensor in runner._paged._tensors} == {FP8}
    positions = (1 + 2 * 4) * 16
    layers = len(attentions(engine.loaded.model))
    config = engine.loaded.config
    assert runner._paged.num_bytes == positions * layers * 2 * config.num_key_value_heads * config.head_dim
    assert "keys and values as torch.float8_e4m3fn, with scales of 0 of 2 layers, else 1" in engine.route_reason


def test_half_precision_passes_the_check(engine: Engine) -> None:
    result = compare(engine, PROMPTS, num_tokens=12, rounds=1)
    assert result.verdict is not None and result.passed, result
    assert result.cache_rounding is not None and 0 < result.cache_rounding < 2**-3


@pytest.mark.slow
def test_the_trained_model_gives_tokens_and_logits_of_its_rounded_self_and_tells_what_that_costs() -> None:
    with Engine.load(embedded_model(), "cpu", EAGER) as engine:
        result = compare(engine, PROMPTS, num_tokens=12, rounds=1)
        assert result.tokens_equal and result.passed and result.verdict is not None
        assert result.cache_rounding is not None and 2**-8 < result.cache_rounding < 2**-4
        # Codes of one side alone: more than the rounding of fp32 tells behind them.
        engine._runner.cache_rounding = Rounding(lambda: {"use_cache": True}, FP8)
        spoilt = compare(engine, PROMPTS, num_tokens=12, rounds=1)
        assert not spoilt.passed, spoilt


def test_a_prompt_in_chunks_gives_the_logits_of_the_whole() -> None:
    prompt, params = list(range(3, 30)), SamplingParams(max_new_tokens=3, ignore_eos=True)
    found = []
    for buckets in ((32,), (8,)):
        with Engine(tiny("llama"), select_device("cpu"), replace(EAGER, prefill_buckets=buckets)) as engine:
            (completion,) = engine.generate([prompt], params, collect_logits=True)
            found.append(completion.logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_scales_of_the_attention_modules_are_taken() -> None:
    loaded = tiny("llama")
    first, second = attentions(loaded.model)
    first.k_scale, first.v_scale = torch.tensor([0.03]), 0.02
    second.register_buffer("k_scale", torch.tensor([0.01, 0.04], dtype=torch.bfloat16))
    with Engine(loaded, select_device("cpu"), EAGER) as engine:
        assert "with scales of 2 of 2 layers" in engine.route_reason
        states = [module._core_attention for module in (first, second)]
        assert [tuple(s.k_scale.shape) for s in states] == [(), (2,)] and states[1].v_scale is None
        assert states[0].v_scale.dtype == states[1].k_scale.dtype == torch.float32
        result = compare(engine, PROMPTS, num_tokens=6, rounds=1)
        assert result.passed and result.tokens_equal, result


@pytest.mark.parametrize("scale", [torch.ones(3), torch.tensor(0.0), float("nan"), torch.tensor([1.0, -2.0])], ids=str)
def test_scales_that_are_none_are_refused(scale: Any) -> None:
    loaded = tiny("llama")
    attentions(loaded.model)[1].v_scale = scale
    with pytest.raises(ModelError, match=r"a quantised key/value cache for model\.layers\.1\.self_attn") as caught:
        Engine(loaded, select_device("cpu"), EAGER)
    assert "its v_scale" in caught.value.found and "2 key/value heads" in caught.value.remedy
    assert not any(hasattr(module, "_core_attention") for module in loaded.model.modules())


def test_calibration_makes_the_largest_value_the_largest_code() -> None:
    loaded = tiny("llama")
    calibrate(loaded.model, PROMPTS)
    for module in attentions(loaded.model):
        assert 0 < float(module.k_scale) < 0.1 and 0 < float(module.v_scale) < 0.1
    seen: dict[str, float] = {}
    module = attentions(loaded.model)[0]
    handle = module.v_proj.register_forward_hook(
        lambda _, __, out: seen.update(top=max(seen.get("top", 0.0), float(out.abs().max())))
    )
    with torch.no_grad():
        for prompt in PROMPTS:
            loaded.model(input_ids=torch.tensor([prompt]))
    handle.remove()
    assert seen["top"] / float(module.v_scale) == pytest.approx(448, rel=1e-4)
    with Engine(loaded, select_device("cpu"), EAGER) as engine:
        assert "with scales of 2 of 2 layers" in engine.route_reason


def test_calibration_of_a_model_without_a_paged_cache_is_refused() -> None:
    with pytest.raises(NotPageable, match="does not call transformers' attention interface"):
        calibrate(tiny("bloom").model, [range(3, 43)])


@pytest.mark.slow
def test_outliers_need_the_scale_that_calibration_gives() -> None:
    loaded = tiny("llama")
    for module in attentions(loaded.model):
        module.v_proj.weight.data *= 3000
        module.o_proj.weight.data /= 3000
    costs = []
    for calibrated in (False, True):
        if calibrated:
            calibrate(loaded.model, PROMPTS)
        with Engine(loaded, select_device("cpu"), EAGER) as engine:
            costs.append(compare(engine, PROMPTS, num_tokens=4, rounds=1).cache_rounding)
    assert costs[1] is not None and costs[0] is not None and costs[1] < costs[0] / 2


def test_a_model_that_has_no_paged_cache_is_refused_and_not_served_otherwise() -> None:
    loaded = tiny("codegen")
    with pytest.raises(UsageError, match="a key/value cache of 'fp8'") as caught:
        Engine(loaded, select_device("cpu"), EAGER)
    assert "can't run on the paged cache, which alone has it: " in caught.value.found
    assert 'kv_cache_dtype="auto"' in caught.value.remedy


@pytest.mark.slow
def test_layers_that_the_cache_numbers_otherwise_are_refused() -> None:
    loaded = tiny("zamba2")  # its attention is shared, and cached under the number of the layer that calls it
    with pytest.raises(UsageError, match="a key/value cache of 'fp8'") as caught:
        Engine(loaded, select_device("cpu"), EAGER)
    assert "it caches keys and values as layer 1" in caught.value.found


def test_rounding_tells_more_behind_codes_than_before() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(200_000, generator=generator, dtype=torch.float64) + 1  # codes are 1/8 apart there
    for noise in (1e-5, 1e-3):
        moved = values * (1 + noise * torch.randn(values.shape, generator=generator, dtype=torch.float64))
        off = relative_difference(moved.to(FP8).double(), values.to(FP8).double())
        assert off == pytest.approx(noise * amplification(noise, FP8), rel=0.35)
    assert amplification(0.5, FP8) == 1 == amplification(0.0, FP8)


def test_the_criterion_allows_rounding_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(4, 512, generator=generator, dtype=torch.float64)
    codes = plain + 0.02 * torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    eager = plain.float()
    ours = codes + 1e-5 * torch.randn(plain.shape, generator=generator, dtype=torch.float64)
    assert judge_rounded([ours.float()], [eager], [plain], [codes], FP8).passed
    assert not judge_rounded([eager], [eager], [plain], [codes], FP8).passed


def test_layers_without_scales_have_none() -> None:
    module, layer = attentions(tiny("llama").model)[0], Any
    assert layer_scales(module, layer, CPU) == (None, None)  # type: ignore[arg-type]
