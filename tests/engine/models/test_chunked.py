"""Llama 4 on the paged route: chunks, layers without positions, temperatures by position, complex rotations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.check.comparison import compare
from core.engine.config import SamplingParams
from core.engine.inspect.attention import LayerState, NotPageable
from core.engine.inspect.masks import Reach
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.models.tiny_rules import WINDOW
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from tests.engine.models.any_time import alone, served_at_any_time

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=64,
    block_size=4,
    decode_buckets=(4,),
    prefill_buckets=(12,),
    max_step_tokens=12,  # so that prompts of more are computed in pieces that end within a chunk
    sampling=("greedy",),
    options=CompileOptions(lowering="inline", strict=True),
)
GREEDY = SamplingParams(max_new_tokens=18, ignore_eos=True)
SHARED = [(11 * i) % 150 + 3 for i in range(21)]
# Lengths right before, at and behind the borders of chunks of 8; two share a beginning that ends within a chunk.
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], list(range(20, 28)), list(range(40, 57)), [*SHARED, 9, 8], [*SHARED, 60, 61, 62]]


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return build_model(tiny_config("llama4_text", **changes), torch_device=torch.device("cpu"), dtype=dtype)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(build(), select_device("cpu"), CONFIG) as engine:
        yield engine


def test_requests_that_come_at_any_time_get_the_tokens_of_the_model_alone(engine: Engine) -> None:
    assert engine.route == "paged", engine.route_reason
    assert {trace.phase for trace in engine.report().traces} == {"decode", "prefill"}
    found = served_at_any_time(engine, PROMPTS, GREEDY)
    assert found[4].num_cached_tokens == 20  # five blocks, of which the layer with chunks keeps the last
    for index, prompt in enumerate(PROMPTS):
        assert list(found[index].token_ids) == alone(engine, prompt, 18), index


def test_logits_in_graphs_hold_the_criterion(engine: Engine) -> None:
    result = compare(engine, PROMPTS[:3], num_tokens=2 * WINDOW, rounds=1)
    assert result.tokens_equal, result.mismatch
    assert result.verdict is not None and result.verdict.passed, result.verdict
    assert 0 < result.verdict.eager_max_error < 1e-4
    traces = engine.report().traces
    for trace in traces:
        assert [choice.op for choice in trace.ops].count("core::attention") == 2
        # Two norms of each layer and the last, and those of query and key behind the rotation.
        assert {each.name: each.matched for each in trace.passes}["lift_rms_norm"] == 7


@pytest.mark.slow
def test_half_precision_holds_the_criterion_too() -> None:
    # Without experts: a token whose scores are nearly equal chooses others at half precision.
    loaded = build(torch.bfloat16, moe_layers=[])
    with Engine(loaded, select_device("cpu"), replace(CONFIG, prefill_buckets=(32,))) as engine:
        assert engine.route == "paged", engine.route_reason
        result = compare(engine, PROMPTS[:3], num_tokens=12, rounds=1)
    assert result.verdict is not None and result.verdict.passed, result.verdict
    assert result.passed, result.mismatch


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "wrong",
    [Reach(WINDOW), Reach(WINDOW + 4, chunked=True), Reach()],
    ids=["a window instead", "chunks of another size", "no chunks"],
)
def test_an_engine_with_another_mask_is_refused(wrong: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = LayerState.__init__

    def mistaken(self: LayerState, keys: Any, values: Any, reach: Reach, *rest: Any) -> None:
        taken(self, keys, values, wrong if reach.chunked else reach, *rest)

    monkeypatch.setattr(LayerState, "__init__", mistaken)
    with pytest.raises(NotPageable, match="differ from its own forward"):
        from core.engine.paged.runner import PagedRunner

        config = replace(CONFIG, options=CompileOptions(mode="off"))
        PagedRunner(build().model, select_device("cpu"), config, max_model_len=64)


def test_a_context_within_one_chunk_is_causal() -> None:
    loaded = build(attention_chunk_size=64)
    with Engine(loaded, select_device("cpu"), replace(CONFIG, options=CompileOptions(mode="off"))) as engine:
        assert engine.route == "paged" and engine._runner.num_groups == 1  # type: ignore[attr-defined]
        assert list(engine.generate([PROMPTS[2]], GREEDY)[0].token_ids) == alone(engine, PROMPTS[2], 18)
