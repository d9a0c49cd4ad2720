"""Whole tiny models of the architectures that must work: traced whole, equal tokens, criterion T1, files untouched."""

from __future__ import annotations

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.check.comparison import compare
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.models.tiny_rules import WINDOW
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device

REQUIRED = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "olmo2", "gpt_neox")
CPU = torch.device("cpu")
# The first is longer than the tiny models' window, and generation leaves it behind in both.
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])
CONFIG = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    decode_buckets=(2,),
    prefill_buckets=(32,),
    sampling=("greedy",),
    options=CompileOptions(lowering="inline", strict=True),
)


def build(model_type: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return build_model(tiny_config(model_type), torch_device=CPU, dtype=dtype)


@pytest.mark.parametrize(
    "model_type",
    [name if name == "gpt_neox" else pytest.param(name, marks=pytest.mark.slow) for name in REQUIRED],
)
def test_a_required_architecture_is_traced_whole_and_right(model_type: str) -> None:
    loaded = build(model_type)
    num_layers = loaded.config.num_hidden_layers
    assert num_layers == 2
    with Engine(loaded, select_device("cpu"), CONFIG) as engine:
        assert engine.route == "paged", engine.route_reason
        traces = engine.report().traces
        assert sorted(trace.phase for trace in traces) == ["decode", "prefill"]
        for trace in traces:
            assert [choice.op for choice in trace.ops].count("core::attention") == num_layers
        result = compare(engine, PROMPTS, num_tokens=2 * WINDOW, rounds=1)
    assert result.num_tokens == 2 * 2 * WINDOW
    assert result.tokens_equal, result.mismatch
    assert result.verdict is not None
    assert result.verdict.passed, result.verdict.reason
    # The bound is made of eager's own error, which has to be rounding for the verdict to say something.
    assert 0 < result.verdict.eager_max_error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_half_precision_holds_the_criterion_too(model_type: str) -> None:
    with Engine(build(model_type, torch.bfloat16), select_device("cpu"), CONFIG) as engine:
        assert engine.route == "paged", engine.route_reason
        result = compare(engine, PROMPTS, num_tokens=12, rounds=1)
    assert result.verdict is not None
    assert result.verdict.passed, result.verdict.reason
    assert result.passed, result.mismatch


def test_the_required_architectures_cover_windows_and_grouped_heads() -> None:
    configs = [tiny_config(model_type) for model_type in REQUIRED]
    windowed = [c.model_type for c in configs if "sliding_attention" in (getattr(c, "layer_types", None) or [])]
    assert {"qwen2", "qwen3", "gemma3_text"} <= set(windowed)
    grouped = [c for c in configs if getattr(c, "num_key_value_heads", c.num_attention_heads) < c.num_attention_heads]
    assert len(grouped) >= 7
