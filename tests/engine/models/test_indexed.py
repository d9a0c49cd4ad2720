"""Sparse attention by an indexer on the paged route: DeepSeek V3.2 and what shares its choice among layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.engine.check.comparison import compare
from core.engine.config import SamplingParams
from core.engine.inspect import attention, past
from core.engine.inspect.attention import NotPageable
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.models.tiny_rules import WINDOW
from core.engine.paged.runner import PagedRunner
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from tests.engine.models.any_time import alone, served_at_any_time
from tests.installed import needs_type
from tests.marks import slow_except

MODELS = ("glm_moe_dsa", "deepseek_v32", "axk2", "dots3_note", "hy_v4")
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=64,
    block_size=4,
    decode_buckets=(4,),
    prefill_buckets=(12,),
    max_step_tokens=12,
    sampling=("greedy",),
    options=CompileOptions(lowering="inline", strict=True),
)
EAGER = replace(CONFIG, options=CompileOptions(mode="off"))
GREEDY = SamplingParams(max_new_tokens=18, ignore_eos=True)
SHARED = [(11 * i) % 150 + 3 for i in range(21)]
# All but the first are longer than the eight positions that an indexer leaves.
PROMPTS = [[3, 4, 5], list(range(20, 30)), list(range(40, 57)), [*SHARED, 9, 8], [*SHARED, 60, 61, 62]]


def build(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    needs_type(model_type)
    return build_model(tiny_config(model_type, **changes), torch_device=torch.device("cpu"), dtype=dtype)


@pytest.fixture(scope="module", params=slow_except(MODELS, "glm_moe_dsa"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The first chooses in one layer for the next one too."""
    with Engine(build(request.param), select_device("cpu"), CONFIG) as engine:
        yield engine


def test_requests_that_come_at_any_time_get_the_tokens_of_the_model_alone(engine: Engine) -> None:
    assert engine.route == "paged" and "keep keys of their own" in engine.route_reason
    assert {trace.phase for trace in engine.report().traces} == {"decode", "prefill"}
    found = served_at_any_time(engine, PROMPTS, GREEDY)
    assert found[4].num_cached_tokens == 20
    for index, prompt in enumerate(PROMPTS):
        assert list(found[index].token_ids) == alone(engine, prompt, 18), index


@pytest.mark.slow
def test_logits_in_graphs_hold_the_criterion(engine: Engine) -> None:
    result = compare(engine, PROMPTS[:3], num_tokens=2 * WINDOW, rounds=1)
    assert result.tokens_equal, result.mismatch
    assert result.verdict is not None and result.verdict.passed, result.verdict
    assert 0 < result.verdict.eager_max_error < 1e-4


@pytest.mark.slow
def test_half_precision_holds_the_criterion_too() -> None:
    # Indexers choose all positions: scores that are nearly equal choose others at half precision.
    loaded = build("deepseek_v32", torch.bfloat16, index_topk=64)
    with Engine(loaded, select_device("cpu"), CONFIG) as engine:
        assert engine.route == "paged", engine.route_reason
        result = compare(engine, PROMPTS[:3], num_tokens=12, rounds=1)
    assert result.verdict is not None and result.verdict.passed, result.verdict


def all_seen(indices: Tensor, num_positions: int) -> Tensor:
    return torch.ones((indices.flatten(0, -2).shape[0], 1, num_positions), dtype=torch.bool)


def one_less(indices: Tensor, num_positions: int) -> Tensor:
    return CHOSEN(indices[..., :-1], num_positions)


def not_kept(self: past.IndexedPositions, keys: Tensor, layer: int) -> Tensor:
    return self._caches[layer][self._tables].flatten(1, 2)[None]


def of_the_last_sequence(self: past.IndexedPositions, keys: Tensor, layer: int) -> Tensor:
    self._tables = self._tables[-1:].expand_as(self._tables)
    return UPDATE(self, keys, layer)


def of_another_layer(self: past.IndexedPositions, keys: Tensor, layer: int) -> Tensor:
    self._caches = dict.fromkeys(self._caches, self._caches[min(self._caches)])
    return UPDATE(self, keys.flip(-1) if layer == min(self._caches) else keys, layer)


CHOSEN, UPDATE = attention._chosen, past.IndexedPositions.update_indexer


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (attention, "_chosen", all_seen),
        (attention, "_chosen", one_less),
        (past.IndexedPositions, "update_indexer", not_kept),
        (past.IndexedPositions, "update_indexer", of_the_last_sequence),
        (past.IndexedPositions, "update_indexer", of_another_layer),
    ],
)
def test_a_planted_mistake_is_refused(
    owner: Any, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(NotPageable, match="differ from its own forward"):
        PagedRunner(build("deepseek_v32").model, select_device("cpu"), EAGER, max_model_len=64)


def test_the_cache_holds_the_keys_of_indexers_and_their_size_is_counted() -> None:
    model = build("glm_moe_dsa").model
    runner = PagedRunner(model, select_device("cpu"), EAGER, max_model_len=64)
    try:
        cache = runner._paged
        assert cache.past.caches and all(each.shape[1:] == (4, 16) for each in cache.past.caches.values())
        held = {each.data_ptr() for each in cache.tensors}
        assert {each.data_ptr() for each in cache.past.caches.values()} <= held
        assert cache.num_bytes == runner.cache.pools[0].num_blocks * 4 * sum_of_layers(model)
    finally:
        runner.close()


def sum_of_layers(model: Any) -> int:
    layers = attention.inspect(model, max_len=64).values()
    asked = past.what_layers_ask(model).indexers.values()
    return sum(each.bytes_per_position for each in (*layers, *asked))
