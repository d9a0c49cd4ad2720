"""core/engine/models/sharding/ on quantised models: what is cut of codes, and the whole model's logits from parts."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch

import core
from core.engine.models.loading import build_model
from core.engine.models.sharding import cut_parameters, planned, quantize_in_parts, shard_model
from core.engine.models.sharding.cuts import Cut
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from core.quantization.layers import WeightOnlyLinear
from core.quantization.make import quantized_layer
from core.quantization.scheme import find_scheme
from tests.common.processes import launch, pretended
from tests.support import refused

IDS = torch.arange(12)[None]
LAYER = "model.layers.0"


@functools.cache
def _made(name: str, scheme: str, **changes: Any) -> Any:
    model = build_model(tiny_config(name, **changes), torch_device=torch.device("cpu"), dtype=torch.float32).model
    return core.quantize(model, scheme, calibration=[IDS])


def made(name: str, scheme: str, **changes: Any) -> Any:
    return copy.deepcopy(_made(name, scheme, **changes))


def cuts(model: Any, layer: str) -> dict[str, Cut]:
    found = cut_parameters(model, planned(model, 2).plan, 2)
    start = f"{LAYER}.{layer}."
    return {name.removeprefix(start): cut for name, cut in found.items() if name.startswith(start)}


def test_scales_of_rows_go_with_the_rows_and_are_whole_where_columns_are_cut() -> None:
    model = made("llama", "int8-static-asymmetric")
    assert cuts(model, "self_attn.q_proj") == dict.fromkeys(("weight", "weight_scale"), Cut(dim=0))
    assert cuts(model, "self_attn.o_proj") == {"weight": Cut(dim=1)}


def test_groups_and_their_zero_points_are_cut_with_the_columns() -> None:
    model = made("llama", "w4a16-asymmetric-g16", intermediate_size=128)
    names = ("weight", "weight_scale", "weight_zero_point")
    assert cuts(model, "mlp.down_proj") == dict.fromkeys(names, Cut(dim=1))
    with pretended():
        shard_model(model)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, WeightOnlyLinear) and layer.weight_shape == (64, 64)
    assert [tuple(getattr(layer, name).shape) for name in names] == [(64, 8), (64, 4), (64, 4)]
    assert layer.values()[0].shape == (64, 64)


def test_experts_are_cut_by_width_with_their_scales() -> None:
    model = made("qwen3_moe", "w4a16-g16", moe_intermediate_size=64)
    found = cuts(model, "mlp.experts")
    assert found == {
        **dict.fromkeys(("gate_up_proj", "gate_up_proj_scale"), Cut(dim=1, blocks=2)),
        **dict.fromkeys(("down_proj", "down_proj_scale"), Cut(dim=2)),
    }
    with pretended():
        shard_model(model)
    experts = model.model.layers[0].mlp.experts
    assert experts.intermediate_dim == 32 and [tuple(each.shape[1:]) for each in experts.values()] == [
        (64, 64),
        (64, 32),
    ]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"intermediate_size": 100}, "holds 100 codes in a row, which are no whole words of 8"),
        ({"intermediate_size": 96}, "has size 3 where it is cut, which 2 processes do not divide"),
    ],
)
def test_codes_and_groups_that_processes_do_not_divide_are_refused(changes: dict[str, Any], found: str) -> None:
    model = made("llama", "w4a16-g4" if "100" in found else "w4a16-g32", **changes)
    with pretended(), refused(UsageError, found):
        shard_model(model)


@pytest.mark.parametrize(("group", "width"), [(16, 48), (4, 56), (2, 60)])
def test_experts_are_divided_by_number_where_words_or_groups_of_their_width_cannot_be(group: int, width: int) -> None:
    model = made("qwen3_moe", f"w4a16-g{group}", moe_intermediate_size=width)
    assert set(cuts(model, "mlp.experts").values()) == {Cut(dim=0)}


def test_a_quantised_head_that_processes_do_not_divide_stays_whole() -> None:
    model = made("llama", "w8a16", vocab_size=161)
    model.lm_head = quantized_layer("lm_head", model.lm_head, find_scheme("w8a16"), {})
    assert planned(model, 2).whole["lm_head"] == "161 rows, which 2 processes do not divide"
    assert planned(model, 7).plan["lm_head"] == "colwise_gather_output"


def test_a_whole_model_quantises_in_parts_what_processes_would() -> None:
    for scheme, changed in (("fp8", True), ("int8-static", False), ("w8a16", False)):
        whole = made("llama", scheme)
        in_parts = quantize_in_parts(copy.deepcopy(whole), 2)
        layer = in_parts.model.layers[0].mlp
        assert (type(layer.down_proj).__name__ == "SummedParts") is changed
        assert type(layer.up_proj) is type(whole.model.layers[0].mlp.up_proj)
        with torch.no_grad():
            found, before = (model(input_ids=IDS, use_cache=False).logits for model in (in_parts, whole))
        assert torch.equal(found, before) is not changed
        assert float((found - before).norm() / before.norm()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("experts", ["width", "number"])
def test_quantised_models_in_parts_give_the_logits_of_the_whole(size: int, experts: str) -> None:
    schemes = ["fp8", "int8", "int8-static", "int8-asymmetric", "w8a16", "w4a16-g16", "w4a16-asymmetric-g16"]
    models = ["llama", "qwen3_moe"] if experts == "width" else ["qwen3_moe"]
    asked = {"models": models, "schemes": schemes, "dtypes": ["float32", "bfloat16"], "experts": experts}
    for found in launch("tests.engine.models.quantized_worker", json.dumps(asked), size=size, timeout_s=600):
        assert {name: each for name, each in found.items() if not each["passed"] or each["differ"]} == {}
        assert max(each["share"] for each in found.values()) < 1.2 / size
        assert all(each["layers"] >= 8 for each in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["width", "number"])
def test_quantised_experts_without_a_gate_in_parts_give_the_logits_of_the_whole(experts: str) -> None:
    asked = {"models": ["nemotron_h"], "schemes": ["fp8", "int8-static", "w4a16-g16"], "dtypes": ["float32"]}
    for found in launch("tests.engine.models.quantized_worker", json.dumps({**asked, "experts": experts}), size=2):
        assert {name: each for name, each in found.items() if not each["passed"] or each["differ"]} == {}
