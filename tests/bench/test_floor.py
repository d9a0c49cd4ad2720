"""Floors by hand for tiny models: bytes of weights, experts and cache, and operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import core
from core.bench import rates
from core.bench.floor import CacheLayer, Shape, decode_floor, prefill_floor, shape_of
from core.bench.presets import PRESETS, random_model
from core.bench.rates import Rates, measure_rates
from core.engine.inspect.masks import Reach
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from tests.support import cpu

RATES = Rates(bytes_per_s=1e9, flops_per_s=1e10, copy_bytes=1, matmul_size=1, dtype="float32")
HIDDEN, INTER, VOCAB, LAYERS = 64, 96, 160, 2


def _shape(name: str) -> Shape:
    preset = PRESETS[name]
    model = random_model(preset.config(), torch_device=torch.device("cpu"), dtype=preset.dtype).model
    return shape_of(model, 64)


def test_a_decode_step_of_the_tiny_llama() -> None:
    # q and o are 64x64, k and v 64x32; three matrices of the MLP; the tied table is read once, as the last matrix.
    dense = LAYERS * (2 * 64 * 64 + 2 * 64 * 32 + 3 * HIDDEN * INTER)
    norms = (2 * LAYERS + 1) * HIDDEN
    weight_bytes = 4 * (dense + norms + VOCAB * HIDDEN + 3 * HIDDEN)  # and a row of the embedding per sequence
    cache_bytes = 3 * 100 * LAYERS * 2 * 2 * 16 * 4  # 3 sequences, 100 positions, 2 heads of 16, key and value
    flops = 2 * 3 * (dense + VOCAB * HIDDEN) + 3 * 100 * LAYERS * 4 * (2 * 16 + 2 * 16)
    floor = decode_floor(_shape("tiny-llama"), RATES, batch=3, context=100)
    assert (floor.weight_bytes, floor.cache_bytes, floor.flops) == (weight_bytes, cache_bytes, flops)
    assert floor.bytes_ms == pytest.approx((weight_bytes + cache_bytes) / 1e9 * 1e3)
    assert floor.ms == floor.bytes_ms > floor.flops_ms == pytest.approx(flops / 1e10 * 1e3)


def test_an_untied_model_reads_its_last_matrix_too_and_of_its_table_the_rows() -> None:
    tied, untied = _shape("tiny-llama"), _shape("tiny-qwen3")
    assert tied.head == untied.head == VOCAB * HIDDEN
    assert untied.vectors - tied.vectors == LAYERS * 2 * 16  # the norms of query and key
    assert untied.dense == tied.dense


def test_experts_are_read_as_far_as_tokens_can_hit_them() -> None:
    shape = _shape("tiny-moe")
    one = 3 * HIDDEN * 32 * LAYERS  # one expert in each layer
    assert shape.experts == 8 * one and (shape.num_experts, shape.top_k) == (8, 2)
    floors = [decode_floor(shape, RATES, batch=batch, context=10) for batch in (1, 3, 4, 5)]
    steps = [
        b.weight_bytes - a.weight_bytes - 4 * HIDDEN * n for a, b, n in zip(floors, floors[1:], (2, 1, 1), strict=False)
    ]
    assert steps == [4 * 4 * one, 2 * 4 * one, 0]  # 2 experts per token, and never more than all 8
    # Operations are those of the experts chosen, however many there are.
    assert floors[0].flops == 2 * (shape.dense + 2 * one + shape.head) + 10 * LAYERS * 4 * 64


def test_a_prefill_counts_a_causal_half_and_one_row_of_logits() -> None:
    shape = _shape("tiny-llama")
    floor = prefill_floor(shape, RATES, 50)
    pairs = 50 * 51 // 2
    assert floor.flops == 2 * 50 * shape.dense + 2 * shape.head + pairs * LAYERS * 4 * 64
    assert floor.cache_bytes == 50 * LAYERS * 256
    assert floor.ms == floor.flops_ms > floor.bytes_ms


def test_recurrent_states_are_read_and_written_in_decode_and_written_by_a_prompt() -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config("mamba2"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    config, shape = model.config, shape_of(model, 64)
    state = config.num_heads * config.head_dim * config.state_size
    columns = config.conv_kernel * (int(config.expand * config.hidden_size) + 2 * config.n_groups * config.state_size)
    assert shape.state_bytes == 4 * config.num_hidden_layers * (state + columns)
    without = replace(shape, state_bytes=0)
    for floor, count in ((decode_floor, 2 * 3), (prefill_floor, 1)):
        given = {"batch": 3, "context": 10} if floor is decode_floor else {"num_tokens": 10}
        assert floor(shape, RATES, **given).cache_bytes == count * shape.state_bytes
        assert floor(without, RATES, **given).cache_bytes == 0


def test_a_window_bounds_what_is_read_and_what_is_multiplied() -> None:
    layer = CacheLayer(bytes_per_position=10, num_heads=1, key_size=1, value_size=1, reach=Reach(4))
    shape = Shape(
        itemsize=1, hidden=0, vocab=0, dense=0, head=0, experts=0, vectors=0, num_experts=0, top_k=0, layers=(layer,)
    )
    assert decode_floor(shape, RATES, batch=2, context=100).cache_bytes == 2 * 4 * 10
    prefill = prefill_floor(shape, RATES, 6)
    assert prefill.cache_bytes == 6 * 10
    assert prefill.flops == 2 * 2 * (1 + 2 + 3 + 4 + 4 + 4)
    chunks = replace(shape, layers=(replace(layer, reach=Reach(4, chunked=True)),))
    assert [decode_floor(chunks, RATES, batch=1, context=n).cache_bytes for n in (4, 5, 7)] == [40, 10, 30]
    assert prefill_floor(chunks, RATES, 10).flops == 2 * 2 * (1 + 2 + 3 + 4 + 1 + 2 + 3 + 4 + 1 + 2)


@pytest.mark.slow
def test_rates_come_from_the_clock() -> None:
    ticks = iter(range(10**6))
    # Each run of five is one tick long, so that one copy takes a fifth of a second.
    found = measure_rates(cpu(), torch.float32, copy_bytes=(1000,), sizes=(8, 16), clock=lambda: float(next(ticks)))
    assert found.bytes_per_s == pytest.approx(2 * 1000 / 0.2)
    assert found.matmul_size == 8 and found.flops_per_s == pytest.approx(2 * 8**3 / 0.2)


@pytest.mark.slow
def test_sizes_grow_until_a_run_can_be_measured() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-5  # 2 us a run: too short
        return now[0]

    found = measure_rates(cpu(), torch.float32, copy_bytes=(1000, 4000), sizes=(8, 16), clock=clock)
    assert (found.copy_bytes, found.matmul_size) == (4000, 16)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("dtype", "counted"), [("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]
)
def test_narrow_products_count_as_wide_ones_where_these_are_faster(
    monkeypatch: pytest.MonkeyPatch, dtype: str, counted: str
) -> None:
    """Torch's product of bf16 takes ten times that of fp32 where a processor has no instructions for it; ours widen."""
    found = {"bfloat16": 1e9, "float32": 1e10, "float16": 2e10}
    monkeypatch.setattr(rates, "_products", lambda device, each, *_: (8, found[str(each).removeprefix("torch.")]))
    measured = measure_rates(cpu(), getattr(torch, dtype), copy_bytes=(1000,))
    assert (measured.flops_per_s, measured.dtype) == (found[counted], counted)


@pytest.mark.parametrize(("scheme", "coded"), [("fp8", True), ("int8-static", True), ("w8a16", False)])
def test_products_of_codes_count_at_twice_the_rate(scheme: str, coded: bool) -> None:
    preset = PRESETS["tiny-llama"]
    model = random_model(preset.config(), torch_device=torch.device("cpu"), dtype=preset.dtype).model
    before = shape_of(model, 64)
    ids = [torch.arange(12).view(1, 12)]
    core.quantize(model, scheme, calibration=ids if "static" in scheme else ())
    shape = shape_of(model, 64)
    assert shape.dense == before.dense and shape.coded == (1.0 if coded else 0.0)
    plain, floor = (prefill_floor(each, RATES, 50) for each in (before, shape))
    assert floor.flops == plain.flops
    saved = 2 * 50 * shape.dense / 2 / RATES.flops_per_s * 1e3 if coded else 0.0
    assert floor.flops_ms == pytest.approx(plain.flops_ms - saved)
