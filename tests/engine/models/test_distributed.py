"""core/engine/models/distributed.py, and the passes over collectives, between two processes on gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import core
from core.compilation.trace.tracing import trace
from core.engine.models.distributed import Processes, initialize
from core.engine.models.sharding import shard_model
from core.errors import UsageError
from tests.common.processes import drawn, launch, pretended
from tests.engine.models.sharded_worker import MODES
from tests.support import refused

DTYPES = [str(torch.float32), str(torch.bfloat16)]
FIRED = {
    "fused": {"fuse_all_reduce_norm": 4},
    "sequence parallel": {"sequence_parallel": 4},
    "asynchronous": {"sequence_parallel": 4, "async_tensor_parallel": 8},
}


@pytest.fixture(scope="module")
def llamas() -> list[Any]:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    return launch("tests.engine.models.sharded_worker")


@pytest.fixture(scope="module")
def collectives() -> list[Any]:
    return launch("tests.common.collective_worker")


SLOW = pytest.mark.slow
"""Of tests whose fixture starts two processes and compiles in both."""


@SLOW
def test_each_process_knows_its_place(llamas: list[Any]) -> None:
    assert [(each["rank"], each["size"], each["local_rank"]) for each in llamas] == [(0, 2, 0), (1, 2, 1)]


@SLOW
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sharded_llama_gives_the_logits_of_the_whole_one(llamas: list[Any], dtype: str, phase: str) -> None:
    for each in llamas:
        found = each[dtype][phase]["off"]["judged"]
        assert found["passed"], found["reason"]
        assert not found["equal"], "nothing was sharded"


@SLOW
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FIRED)
def test_passes_on_and_off_give_equal_logits(llamas: list[Any], name: str, dtype: str, phase: str) -> None:
    for each in llamas:
        found = each[dtype][phase][name]
        assert found["counts"] == FIRED[name]
        assert found["judged"]["passed"], found["judged"]["reason"]


@SLOW
def test_buckets_of_one_trace_that_can_be_split_are_and_run_a_devices_own_ops(llamas: list[Any]) -> None:
    # The embedding's sum stays a sum: the first norm and what is added to it both read it.
    names = ("all_gather", "all_gather_linear", "all_reduce", "linear_reduce_scatter", "local_shard")
    ops = [f"core::{name}" for name in names]
    for each in llamas:
        found = each["compiled"]
        assert found["counts"] == {"even": FIRED["asynchronous"], "odd": FIRED["fused"]} and found["own"] == ops
        assert found["served"] == [[4, 8], [7]] and found["equal"] == [True, True, True]


@SLOW
def test_the_engine_generates_on_a_sharded_model(llamas: list[Any]) -> None:
    for each in llamas:
        assert each["tokens"]["got"] == dict.fromkeys(MODES, each["tokens"]["wanted"])


@SLOW
def test_collectives_move_what_they_say(collectives: list[Any]) -> None:
    assert [each["moving"] for each in collectives] == [[], []]


@SLOW
def test_fused_ops_are_the_ops_that_their_names_end_in(collectives: list[Any]) -> None:
    for each in collectives:
        assert len(each["ops"]) == 6 and not any(each["ops"].values()), each["ops"]


@SLOW
def test_layers_written_by_hand_are_rewritten_right(collectives: list[Any]) -> None:
    for each in collectives:
        assert len(each["models"]) == 20
        assert {name: wrong for name, wrong in each["models"].items() if wrong} == {}


# --- one process


def test_a_script_started_by_itself_is_a_job_of_one() -> None:
    assert initialize() == Processes(rank=0, size=1, local_rank=0)
    assert not torch.distributed.is_initialized()


def test_a_group_that_is_there_stays() -> None:
    with pretended(4):
        assert initialize("gloo") == Processes(rank=0, size=4, local_rank=0)


def test_a_group_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with refused(UsageError, "'gloo'", "environment variable"):
        initialize("gloo")


class Attention(nn.Module):
    def __init__(self, num_heads: int = 4, inner: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, inner), nn.Linear(inner, 8)) for _ in range(2)])
        self.head = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(8)

        class config:
            num_attention_heads, num_key_value_heads = 8, num_heads

        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


PLAN = {"layers.*.0": "colwise", "layers.*.1": "rowwise", "head": "colwise_gather_output", "norm": "replicate"}


@pytest.fixture
def group() -> Iterator[str]:
    with pretended() as name:
        yield name


def test_weights_are_cut_and_a_bias_is_added_once(group: str) -> None:
    model = Attention()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert shard_model(model, PLAN, group=group) is model
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name.startswith("layers.0")}
    assert shapes == {
        "layers.0.0.weight": (8, 8),
        "layers.0.0.bias": (8,),
        "layers.0.1.weight": (8, 8),
        "layers.0.1.bias": (8,),
    }
    assert torch.equal(model.layers[0][1].weight, whole["layers.0.1.weight"][:, :8])
    assert torch.equal(model.layers[0][1].bias, whole["layers.0.1.bias"])
    assert (model.layers[1][0].out_features, model.head.out_features) == (8, 3)
    assert model(drawn(2, 8)).shape == (2, 6)


def test_a_sharded_layer_that_is_quantised_still_reduces(group: str) -> None:
    model = shard_model(Attention(inner=32), PLAN, group=group)
    core.quantize(model, "fp8")
    assert not isinstance(model.layers[0][1], nn.Linear)
    graph = trace(lambda x: model(x), {"x": drawn(4, 8)})
    called = [str(node.target) for node in graph.module.graph.nodes]
    reduced, quantized = (sum(name.startswith(f"core.{op}") for name in called) for op in ("all_reduce", "quantized"))
    assert (reduced, quantized) == (2, 5)


def test_one_process_holds_the_whole_model() -> None:
    model, whole = Attention(), Attention()
    whole.load_state_dict(model.state_dict())
    x = drawn(2, 8)
    assert torch.equal(shard_model(model, PLAN)(x), whole(x))


@pytest.mark.parametrize(
    ("model", "plan", "phrases"),
    [
        (Attention, None, ("no plan of its own",)),
        (Attention, {"layers.*.0": "sideways"}, ("'sideways'", "colwise_gather_output")),
        (Attention, {"layers.*.7": "colwise"}, ("no module is named 'layers.*.7'",)),
        (Attention, {"norm": "colwise"}, ("norm (colwise) is a LayerNorm",)),
        (lambda: Attention(num_heads=3), PLAN, ("num_key_value_heads is 3, which 2 processes do not divide",)),
        (lambda: Attention(inner=15), PLAN, ("layers.0.0 (colwise) has size 15",)),
    ],
    ids=["no plan", "style", "module", "no linear", "heads", "size"],
)
def test_what_cannot_be_cut_is_an_error_and_the_model_stays(
    model: Any, plan: Any, phrases: tuple[str, ...], group: str
) -> None:
    made = model()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    with refused(UsageError, "sharding Attention for tensor parallelism", *phrases):
        shard_model(made, plan, group=group)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "names"), [(2, []), (4, ["llama acme", "qwen3_moe acme"])], ids=["2", "4"])
def test_processes_choose_among_their_parts_of_the_vocabulary_what_one_chooses(size: int, names: list[str]) -> None:
    for found in launch("tests.engine.models.choice_worker", json.dumps(names), size=size):
        assert found.pop("chosen") == []
        assert {*found} >= {"llama acme", *names}
        for name, each in found.items():
            assert each == {"differ": [], "near": True, "parts": [False, name != "adds"]}, name
