"""Tiny configurations: the list of types, sizes by rule, kinds of layers, and reasons for what can't be built."""

from __future__ import annotations

import pytest
import torch

from core.engine.models.loading import build_model
from core.engine.models.tiny import causal_lm_types, tiny_config
from core.errors import ModelError
from tests.installed import needs_type


def test_the_types_are_those_of_transformers() -> None:
    types = causal_lm_types()
    assert len(types) > 150
    assert list(types) == sorted(set(types))
    assert {"llama", "gpt2", "mamba", "bert"} <= set(types)


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "gpt_neo", "deepseek_v3", "mamba2", "nemotron_h", "gemma4_text", "bert", "llama4"]
)
def test_a_tiny_model_runs(model_type: str) -> None:
    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=torch.float32)
    assert loaded.num_parameters < 400_000
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.arange(3, 15)[None]).logits
    assert logits.shape == (1, 12, 160)
    assert logits.isfinite().all()


def test_sizes_fit_together() -> None:
    config = tiny_config("llama", max_positions=512, vocab_size=100)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        64,
        4,
        2,
        16,
    )
    assert (config.max_position_embeddings, config.vocab_size, config.num_hidden_layers) == (512, 100, 2)


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("qwen2", {"sliding_attention", "full_attention"}),  # its default has windows switched off
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("bamba", {"linear_attention", "full_attention"}),
        ("lfm3", {"conv", "sliding_attention", "full_attention"}),
    ],
)
def test_every_kind_of_layer_is_shown(model_type: str, kinds: set[str]) -> None:
    needs_type(model_type)
    config = tiny_config(model_type)
    assert set(config.layer_types) == kinds
    assert len(config.layer_types) == config.num_hidden_layers <= 4


def test_layers_that_share_keys_come_after_one_of_their_kind() -> None:
    config = tiny_config("gemma3n_text")
    own = config.layer_types[: -config.num_kv_shared_layers]
    assert set(config.layer_types[-config.num_kv_shared_layers :]) <= set(own)


def test_changes_win() -> None:
    assert tiny_config("llama", num_hidden_layers=3, head_dim=8).num_hidden_layers == 3


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ModelError, match="no causal language model of that type"):
        tiny_config("no_such_type")


def test_a_configuration_that_does_not_validate_says_why() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok=1") as caught:
        tiny_config("zaya", num_experts_per_tok=2)
    assert "'zaya'" in caught.value.asked
