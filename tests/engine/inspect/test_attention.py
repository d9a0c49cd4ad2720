"""Inspecting a model through transformers' interfaces, and the reasons for which one can't be paged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.engine.inspect import attention
from core.engine.inspect.attention import (
    INSPECT,
    AttentionLayer,
    LayerState,
    NotPageable,
    StepTensors,
    attach,
    detach,
    implementation,
    inspect,
)
from core.engine.inspect.masks import ALL, Reach
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.models.tiny_rules import WINDOW

CPU = torch.device("cpu")


def tiny(model_type: str, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=torch.float32).model


def call_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Attend as transformers' models do: through whatever the configuration names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Any = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]  # type: ignore[union-attr]
    out: Tensor = function(module, query, key, value, mask, **options)[0]
    return out


class Attention(nn.Module):
    """One attention module whose call can be spoilt."""

    def __init__(self, config: Any, spoil: Callable[[dict[str, Any]], None], times: int = 1) -> None:
        super().__init__()
        self.config = config
        self.spoil = spoil
        self.times = times
        self.qkv = nn.Linear(16, 48)
        self.is_causal = True

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        call = {"query": query, "key": key, "value": value, "mask": mask, "scaling": 8**-0.5}
        self.spoil(call)
        for _ in range(self.times):
            out = call_attention(self, **call)
        return out.flatten(2)


class FakeModel(nn.Module):
    """What the engine needs of a transformers model, with one layer of attention."""

    def __init__(self, spoil: Callable[[dict[str, Any]], None] = lambda call: None, *, times: int = 1) -> None:
        super().__init__()
        from transformers import LlamaConfig

        self.config = LlamaConfig(vocab_size=32, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        self.config._attn_implementation = "sdpa"
        self.embed = nn.Embedding(32, 16)
        self.attn = Attention(self.config, spoil, times)

    def _can_set_attn_implementation(self) -> bool:
        return True

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        from transformers.masking_utils import create_causal_mask

        x = self.embed(input_ids)
        mask = create_causal_mask(self.config, x, None, past_key_values=None, position_ids=position_ids)
        out: Tensor = self.attn(x, mask)
        return out


def test_a_model_is_described_layer_by_layer() -> None:
    layers = list(inspect(tiny("gemma3_text"), max_len=64).values())
    assert [layer.path for layer in layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [layer.reach for layer in layers] == [Reach(WINDOW), Reach()]
    assert layers[0] == AttentionLayer(
        path="model.layers.0.self_attn",
        num_heads=4,
        num_kv_heads=2,
        key_size=16,
        value_size=16,
        reach=Reach(WINDOW),
        dtype=torch.float32,
    )
    assert layers[0].bytes_per_position == 2 * (16 + 16) * 4


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert [layer.reach for layer in inspect(tiny("gemma3_text"), max_len=WINDOW).values()] == [Reach(), Reach()]


def test_value_heads_may_be_narrower_than_keys() -> None:
    layers = list(inspect(tiny("deepseek_v3"), max_len=32).values())
    assert {(layer.key_size, layer.value_size) for layer in layers} == {(24, 16)}


@pytest.mark.parametrize("model_type", ["llama", "mamba", "bloom"])
def test_inspection_leaves_the_model_as_it_was(model_type: str) -> None:
    model = tiny(model_type)
    before = model.config._attn_implementation
    with suppress(NotPageable):
        inspect(model, max_len=32)
    assert model.config._attn_implementation == before
    assert attention._recording.current is None


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "does not call transformers' attention interface"),
        ("mamba", "ran without calling transformers' attention interface"),
        ("diffllama", "attends more than once per step"),
        ("doge", "gets a mask that was not made by transformers' mask functions"),
    ],
)
def test_a_model_that_cannot_be_paged_says_why(model_type: str, reason: str) -> None:
    with pytest.raises(NotPageable, match=reason):
        inspect(tiny(model_type), max_len=32)


def test_the_fake_model_is_fine_unspoilt() -> None:
    (layer,) = inspect(FakeModel(), max_len=32).values()
    assert (layer.path, layer.num_heads, layer.reach) == ("attn", 2, Reach())


def _bias(call: dict[str, Any]) -> None:
    call["position_bias"] = torch.zeros(1, 2, 8, 8)


def _own_mask(call: dict[str, Any]) -> None:
    call["mask"] = call["mask"] + torch.linspace(0, 1, 8)


def _other_window(call: dict[str, Any]) -> None:
    call["sliding_window"] = 4


def _dropout(call: dict[str, Any]) -> None:
    call["dropout"] = 0.1


def _cross(call: dict[str, Any]) -> None:
    call["key"], call["value"] = call["key"][:, :, :4], call["value"][:, :, :4]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_bias, "attn passes 'position_bias', which the paged op does not know"),
        (_own_mask, "attn gets a mask that was not made by transformers' mask functions"),
        (_other_window, "attn states a window of 4, and its mask is a window of 0"),
        (_dropout, "attn drops attention weights at inference"),
        (_cross, "not self-attention by token"),
    ],
)
def test_a_call_beyond_the_op_is_refused(spoil: Callable[[dict[str, Any]], None], reason: str) -> None:
    with pytest.raises(NotPageable, match=reason):
        inspect(FakeModel(spoil), max_len=32)


def test_attending_twice_is_refused() -> None:
    with pytest.raises(NotPageable, match="attn attends more than once per step"):
        inspect(FakeModel(times=2), max_len=32)


def test_a_module_that_leaves_causality_to_its_mask_is_taken_at_its_mask() -> None:
    model = FakeModel()
    model.attn.is_causal = False
    assert [layer.reach for layer in inspect(model, max_len=32).values()] == [ALL]


def test_a_window_stated_beyond_the_context_does_not_matter() -> None:
    def wide(call: dict[str, Any]) -> None:
        call["sliding_window"] = 4096

    assert len(inspect(FakeModel(wide), max_len=32)) == 1


def test_a_failing_forward_is_a_reason() -> None:
    def broken(call: dict[str, Any]) -> None:
        raise ValueError("no such luck")

    with pytest.raises(NotPageable, match="its forward fails without a cache: ValueError: no such luck"):
        inspect(FakeModel(broken), max_len=32)


def test_the_implementation_is_put_back_after_an_error() -> None:
    model = FakeModel()
    with pytest.raises(KeyError), implementation(model, INSPECT):
        assert model.config._attn_implementation == INSPECT
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_a_layers_state_is_no_part_of_the_model() -> None:
    module: Any = nn.Linear(2, 2)
    state = LayerState(torch.zeros(1), torch.zeros(1), 0, StepTensors())
    attach(module, state)
    assert set(module.state_dict()) == {"weight", "bias"}
    assert copy.deepcopy(module)._core_attention is state
    detach(module)
    detach(module)  # once more does no harm
    assert not hasattr(module, "_core_attention")
