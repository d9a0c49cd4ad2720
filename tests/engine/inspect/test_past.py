"""What layers ask of the cache: found by asking, and answered for each token of a step of several sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.engine.inspect import past
from core.engine.inspect.attention import NotPageable, StepTensors
from core.engine.inspect.past import Asked, IndexedPositions, TokenPositions, visible, what_layers_ask
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
    assert what_layers_ask(tiny(model_type, **changes)) == Asked(positions=expected)


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
        what_layers_ask(model)
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

    monkeypatch.setattr(past, "SIZE", "noting")
    AttentionInterface.register("noting", attend)
    ids = torch.tensor([[7, 7, 7, 7, 7]])
    given = torch.tensor([0, 7, 8, 15, 40])
    with past.implementation(model, "noting"), torch.no_grad():
        model(input_ids=ids, position_ids=given[None], past_key_values=TokenPositions(given), use_cache=False)
    (query,) = queries
    # The tokens are alike and the layer rotates nothing: its queries differ by their temperature alone.
    tuned = torch.log1p(((given + 1.0) / 8).floor()) * 0.1 + 1.0
    scale = (query[0, 0] / query[0, 0, :1]).mean(1)
    torch.testing.assert_close(scale, tuned, rtol=1e-3, atol=0)
    assert tuned.unique().numel() == 4


@pytest.mark.parametrize(
    ("model_type", "layers"), [("deepseek_v32", [0, 1]), ("hy_v4", [0]), ("llama", []), ("qwen3_next", [])]
)
def test_the_keys_of_indexers_are_found(model_type: str, layers: list[int]) -> None:
    asked = what_layers_ask(tiny(model_type))
    assert sorted(asked.indexers) == layers
    assert all(each.dtype == torch.float32 for each in asked.indexers.values())


def test_keys_of_each_tokens_own_sequence_give_its_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    step = StepTensors(
        block_table=torch.tensor([[2, 1], [3, 0]], dtype=torch.int32),
        # Positions 2 to 4 of the first, 0 of the second, padding.
        slot_mapping=torch.tensor([2 * 4 + 2, 2 * 4 + 3, 1 * 4, 3 * 4, 0]),
        query_starts=torch.tensor([0, 3, 4], dtype=torch.int32),
    )
    cache = torch.randn(4, 4, 8, generator=generator)
    before = cache.clone()
    stand_in = IndexedPositions(torch.tensor([2, 3, 4, 0, 0]), step, {5: cache})
    keys, query = torch.randn(1, 5, 8, generator=generator), torch.randn(1, 5, 3, 8, generator=generator)
    found = stand_in.update_indexer(keys, 5)
    scores = torch.matmul(query, found.transpose(-1, -2).unsqueeze(1))  # as the models write it
    first = torch.cat([before[2, :2], keys[0, :3]])
    torch.testing.assert_close(scores[0, 0, :3, :, :5], torch.einsum("thd,sd->ths", query[0, :3], first))
    torch.testing.assert_close(scores[0, 0, 3, :, 0], query[0, 3] @ keys[0, 3])
    assert torch.equal(cache[2, :2], before[2, :2]) and torch.equal(cache[1, 1:], before[1, 1:])


def test_each_token_sees_its_own_position_and_those_before() -> None:
    mask = visible(torch.tensor([2, 0]), 4)
    assert mask.shape == (1, 1, 2, 4)
    assert mask[0, 0].tolist() == [[True, True, True, False], [True, False, False, False]]
