"""Layers that count positions by themselves: found by asking, and told the position of each token of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.engine.inspect import positions
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.positions import TokenPositions, counts_positions
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config

STEP = torch.tensor([5, 0, 1, 2, 9])


def tiny(model_type: str, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=torch.device("cpu"), dtype=torch.float32).model


def test_what_came_before_gives_each_token_its_position() -> None:
    cache = TokenPositions(STEP)
    assert torch.equal(torch.arange(5) + cache.get_seq_length(1), STEP)
    keys, values = torch.ones(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)
    assert cache.update(keys, values, 0) == (keys, values)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama4_text", {}, True),
        ("llama4_text", {"attn_temperature_tuning": False}, False),
        ("llama4_text", {"no_rope_layers": [1, 1]}, False),
        ("llama", {}, False),
        ("mamba", {}, False),  # takes no such cache
        ("qwen3_next", {}, False),  # asks for recurrent states, which this one has not
    ],
)
def test_a_model_is_asked_whether_its_layers_count(model_type: str, changes: dict[str, Any], expected: bool) -> None:
    assert counts_positions(tiny(model_type, **changes)) is expected


class Counting(nn.Module):
    """A model whose layer wants one number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.config = SimpleNamespace(_attn_implementation="eager")

    def _can_set_attn_implementation(self) -> bool:
        return True

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> Tensor:
        return torch.arange(int(past_key_values.get_seq_length(0)), 9) * self.weight


def test_a_layer_that_takes_one_number_for_all_tokens_is_refused() -> None:
    model = Counting()
    with pytest.raises(NotPageable, match="takes no position for each token: "):
        counts_positions(model)
    assert model.config._attn_implementation == "eager"


def test_the_temperature_of_each_token_is_that_of_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama4_text").eval()
    layer = model.model.layers[1].self_attn
    queries: list[Tensor] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        if module is layer:
            queries.append(query)
        return torch.zeros_like(query.transpose(1, 2)), None

    from transformers import AttentionInterface

    monkeypatch.setattr(positions, "SIZE", "noting")
    AttentionInterface.register("noting", attend)
    ids = torch.tensor([[7, 7, 7, 7, 7]])
    given = torch.tensor([0, 7, 8, 15, 40])
    with positions.implementation(model, "noting"), torch.no_grad():
        model(input_ids=ids, position_ids=given[None], past_key_values=TokenPositions(given), use_cache=False)
    (query,) = queries
    # The tokens are alike and the layer rotates nothing: its queries differ by their temperature alone.
    tuned = torch.log1p(((given + 1.0) / 8).floor()) * 0.1 + 1.0
    scale = (query[0, 0] / query[0, 0, :1]).mean(1)
    torch.testing.assert_close(scale, tuned, rtol=1e-3, atol=0)
    assert tuned.unique().numel() == 4
