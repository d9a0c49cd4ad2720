"""The probe that tells a paged run from another function: its sequences, its bound, and what it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.bench.presets import random_model
from core.compilation.options import CompileOptions
from core.engine.inspect import probe
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.past import Asked
from core.engine.inspect.probe import (
    depends_on_longest,
    largest_difference,
    own_logits,
    position_difference,
    probe_sequences,
    rounding_bound,
)
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.paged.runner import PagedRunner
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_num_seqs=2, options=CompileOptions(mode="off"))
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 4096,
    "floor_scale": 16,
    "attn_scale": 1.0,
    "attn_temperature_tuning": True,
    "no_rope_layers": [0, 0],
    "layer_types": ["full_attention"] * 2,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 1.0,
}


def tiny(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=dtype).model


def page(model: Any, max_model_len: int = 64, config: EngineConfig = CONFIG) -> None:
    PagedRunner(model, select_device("cpu"), config, max_model_len=max_model_len).close()


def bound(model: Any) -> float:
    sequences = probe_sequences(model, max_model_len=64, max_num_seqs=2)
    with torch.no_grad():
        return rounding_bound(model, sequences, own_logits(model, sequences))


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "lengths"),
    [(2, 8, [2, 2]), (3, 8, [2, 2]), (5, 8, [4, 4]), (64, 2, [63, 6]), (2048, 2, [97, 6]), (64, 1, [63])],
)
def test_a_long_and_a_short_sequence_fit_the_context(max_model_len: int, max_num_seqs: int, lengths: list[int]) -> None:
    sequences = probe_sequences(tiny("llama"), max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    assert [len(tokens) for tokens in sequences] == lengths
    assert len({tuple(tokens) for tokens in sequences}) == len(lengths)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 0.03, 0.09), (torch.float32, 7e-6, 1e-4)])
def test_the_bound_is_made_of_the_models_own_noise(dtype: torch.dtype, least: float, most: float) -> None:
    assert least < bound(tiny("llama", dtype)) < most


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 0.03), (torch.float32, 1e-3)])
def test_without_a_cached_run_the_bound_is_fixed(
    dtype: torch.dtype, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> list[torch.Tensor]:
        raise RuntimeError("no cache today")

    monkeypatch.setattr(probe, "_cached_logits", failing)
    assert bound(tiny("llama", dtype)) == expected


def test_a_cached_run_that_is_another_function_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_cached_logits", lambda model, tokens: [1.5 * x for x in own_logits(model, tokens)])
    assert bound(tiny("llama", torch.bfloat16)) == 0.03


def test_the_bound_is_three_times_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_cached_logits", lambda model, tokens: [1.05 * x for x in own_logits(model, tokens)])
    assert bound(tiny("llama", torch.bfloat16)) == pytest.approx(0.15, rel=0.02)


def test_attention_spelled_out_that_differs_widely_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_eager_logits", lambda model, tokens: [1.5 * x for x in own_logits(model, tokens)])
    assert bound(tiny("llama", torch.bfloat16)) == 0.0625


def test_the_sequence_that_differs_most_counts() -> None:
    expected = [torch.ones(2, 4), torch.ones(2, 4)]
    assert largest_difference(expected, expected) == 0
    assert largest_difference([torch.ones(2, 4), torch.ones(2, 4) * 1.5], expected) == 0.5
    broken = [torch.full((2, 4), float("nan")), torch.ones(2, 4)]
    assert not largest_difference(broken, expected) <= 1


def test_tokens_that_neither_allows_are_left_out_of_a_difference() -> None:
    expected = torch.tensor([[1.0, -torch.inf, 1.0]])
    assert largest_difference([torch.tensor([[1.0, -torch.inf, 2.0]])], [expected]) == pytest.approx(0.5**0.5)
    assert not largest_difference([torch.tensor([[1.0, 5.0, 1.0]])], [expected]) <= 1
    assert not largest_difference([torch.tensor([[1.0, torch.inf, 1.0]])], [expected]) <= 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("model_type", ["minimax", "recurrent_gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_in_caches_of_its_own_is_found_in_half_precision_too(
    model_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.engine.inspect.recurrent._accessors", lambda _kind: ())  # by which MiniMax's is served
    with pytest.raises(NotPageable, match="it keeps state outside attention"):
        page(tiny(model_type, dtype))


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_models_pass_in_half_precision(model_type: str, dtype: torch.dtype) -> None:
    page(tiny(model_type, dtype))


@pytest.mark.slow
def test_positions_counted_over_the_whole_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    page(tiny("llama4_text", **LLAMA4))
    monkeypatch.setattr("core.engine.paged.model.what_layers_ask", lambda model: Asked())
    with pytest.raises(NotPageable, match="or mixes sequences of a step"):
        page(tiny("llama4_text", **LLAMA4))


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("max_model_len", [2, 3, 7])
def test_short_contexts_are_served(model_type: str, max_model_len: int) -> None:
    model = tiny(model_type, max_positions=max_model_len)
    assert position_difference(model) < 1e-6
    page(model, max_model_len)


def test_one_sequence_at_a_time_is_probed_alone() -> None:
    page(tiny("llama"), config=EngineConfig(max_num_seqs=1, options=CompileOptions(mode="off")))


@pytest.mark.parametrize("model_type", ["phi3"])
def test_a_table_chosen_by_the_longest_sequence_is_refused(model_type: str) -> None:
    model = tiny(model_type, max_positions=128, original_max_position_embeddings=32, rope_parameters=LONGROPE)
    with pytest.raises(NotPageable, match="'longrope' its position table depends on the longest sequence of the step"):
        page(model, 33)
    page(model, 32)


def test_rope_parameters_are_found_wherever_they_stand() -> None:
    config = tiny_config("llama")
    assert depends_on_longest(config, 64) == ""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config.rope_parameters = {**dynamic, "original_max_position_embeddings": 32}
    assert "rope type 'dynamic'" in depends_on_longest(config, 64)
    assert depends_on_longest(config, 32) == ""
    # Without an original length it is that of the model.
    config.rope_parameters = dynamic
    assert depends_on_longest(config, 256) == ""
    config.rope_parameters = {"sliding_attention": {"rope_type": "default"}, "full_attention": LONGROPE}
    assert "beyond 32 tokens" in depends_on_longest(config, 64)
    config.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    assert depends_on_longest(config, 64) == ""


CHAOTIC: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 6,
}
"""Routers so close to ties that rounding alone makes other logits."""


@pytest.mark.slow
def test_a_model_whose_routers_flip_by_rounding_is_served_and_faults_are_still_found() -> None:
    config = tiny_config("gpt_oss", **CHAOTIC)
    model = random_model(config, torch_device=CPU, dtype=torch.bfloat16).model
    page(model)
    sequences = probe_sequences(model, max_model_len=64, max_num_seqs=2)
    with torch.no_grad():
        expected = own_logits(model, sequences)
        shaken = probe.shaken_bound(model, sequences, expected, own_logits)
        assert rounding_bound(model, sequences, expected) < 0.1 < shaken <= 0.9
        for faulty in (sequences[::-1], [tokens[-2:] for tokens in sequences]):  # mixed, and all context lost
            assert largest_difference(own_logits(model, faulty), expected) > shaken


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
def test_rounding_moves_a_model_without_routers_little(dtype: torch.dtype, most: float) -> None:
    model = tiny("llama", dtype)
    sequences = probe_sequences(model, max_model_len=64, max_num_seqs=2)
    with torch.no_grad():
        assert probe.shaken_bound(model, sequences, own_logits(model, sequences), own_logits) <= most
