"""core/engine/models/sharding/derived.py: plans that are read off graphs, where transformers has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.engine.models.sharding.derived import derived, lines_in
from core.engine.models.sharding.plan import plan_of
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from tests.common.processes import launch
from tests.support import refused

transformers = pytest.importorskip("transformers")
CUT = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
FEED_FORWARD = {"intermediate": "colwise", "output": "rowwise"}
GATED = {**CUT, "layers.*.gate": "colwise"}


class Result(NamedTuple):
    logits: Tensor


class Layer(nn.Module):
    """An MLP with something between its products."""

    def __init__(self, between: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.ones(32))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.between(self, x))
        return result


class Small(nn.Module):
    def __init__(self, *between: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(map(Layer, between))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Result:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return Result(x @ self.embedding.weight.T)


def relu(layer: Layer, x: Tensor) -> Tensor:
    return F.relu(layer.up(x))


def written_out(layer: Layer, x: Tensor) -> Tensor:
    """As BLOOM and GPT-2 spell the GELU, and Falcon its product."""
    y = x @ layer.up.weight.T
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


FITTING: dict[str, tuple[Callable[[Layer, Tensor], Tensor], dict[str, str]]] = {
    "relu": (relu, CUT),
    "written out": (written_out, CUT),
    "gated": (lambda layer, x: F.silu(layer.gate(x)) * layer.up(x), GATED),
    "cast": (lambda layer, x: F.gelu(layer.up(x).double()).to(x.dtype), CUT),
    "dropout": (lambda layer, x: F.dropout(F.relu(layer.up(x)), 0.1, training=layer.training), CUT),
    "a number for each token": (lambda layer, x: layer.up(x) * x.mean(-1, keepdim=True), CUT),
}
OTHERS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "a norm over the features": lambda layer, x: F.layer_norm(layer.up(x), (32,)),
    "a softmax over the features": lambda layer, x: layer.up(x).softmax(-1),
    "a mean over the features": lambda layer, x: (y := layer.up(x)) / y.square().mean(-1, keepdim=True),
    "a parameter for each feature": lambda layer, x: F.relu(layer.up(x)) * layer.scale,
    "turned features": lambda layer, x: F.relu(layer.up(x)).flip(-1),
    "halves": lambda layer, x: torch.cat(layer.up(x).chunk(2, -1)[::-1], -1),
    "a weight with two readers": lambda layer, x: F.relu(layer.up(x)) + layer.up(x + 1),
    "a second reader": lambda layer, x: F.relu(y := layer.up(x)) + y[..., :1] * 0,
}


@pytest.mark.parametrize("case", FITTING)
@pytest.mark.cases(3)
def test_what_lies_between_two_products_feature_by_feature_is_cut(case: str) -> None:
    between, lines = FITTING[case]
    assert lines_in(Small(between, between).eval()) == lines


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.cases(3)
def test_all_else_stays_whole(case: str) -> None:
    assert lines_in(Small(OTHERS[case], OTHERS[case]).eval()) == {}


def test_a_line_is_for_all_layers_or_none() -> None:
    assert lines_in(Small(relu, OTHERS["a norm over the features"]).eval()) == {}


def test_a_configuration_is_read_once_without_weights() -> None:
    lines = {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}
    with torch.device("meta"):
        model, again = (transformers.AutoModelForCausalLM.from_config(tiny_config("opt")) for _ in range(2))
    assert derived(model) == (lines, "") and derived(again) is derived(model)


def test_a_configuration_that_cannot_be_shortened_is_read_whole() -> None:
    lines = {f"prophetnet.decoder.layers.*.feed_forward.{name}": style for name, style in FEED_FORWARD.items()}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("prophetnet"))
    assert derived(model) == (lines, "")


def test_a_model_that_cannot_be_traced_has_no_plan() -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not today")

    kind: Any = type("Broken", (transformers.OPTForCausalLM,), {"forward": broken})
    with torch.device("meta"):
        model = kind(tiny_config("opt"))
    assert derived(model)[0] == derived(nn.Linear(2, 2))[0] == {}
    with refused(UsageError, "no plan of its own, and its graph can't be read: "):
        plan_of(model, 2)


@pytest.mark.slow
def test_types_without_a_plan_give_the_logits_of_the_whole_in_parts() -> None:
    asked: dict[str, Any] = {"models": ["opt", "falcon", "bloom", "lfm2"], "dtypes": ["float32", "bfloat16"]}
    for found in launch("tests.engine.models.plan_worker", json.dumps(asked), size=2):
        assert {name: each for name, each in found.items() if not each.get("passed")} == {}
        assert all(each["share"] < 0.9 for each in found.values())
