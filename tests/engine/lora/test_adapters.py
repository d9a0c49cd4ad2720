"""Folders of adapters: what is read, by which formula, and what is refused before anything is written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.passes.packing import Packing
from core.engine.lora.adapters import Adapters, read_tensors
from core.engine.lora.layers import find_layers
from core.engine.lora.memory import AdapterMemory
from core.engine.lora.stated import CONFIG_NAME, WEIGHTS_NAME, read_stated
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.errors import ModelError, UsageError
from tests.engine.lora.folders import ATTENTION, make_layers, save_adapter
from tests.support import refused

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32).model


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """An adapter of rank 4 on the attention's layers."""
    layers = make_layers(model, ATTENTION, rank=4, seed=0)
    return save_adapter(tmp_path / "adapter", layers, rank=4, alpha=8)


@pytest.fixture
def adapters(model: Any) -> Adapters:
    return Adapters(AdapterMemory(model, CPU, 2, 8))


def state(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text())
    (folder / CONFIG_NAME).write_text(json.dumps({**config, **fields}))


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    changed(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)


@pytest.mark.parametrize(
    ("stated", "scale"),
    [
        ({}, 8 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"alpha_pattern": {"q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3}}, 2 / 4),
        ({"alpha_pattern": {"_proj": 2}}, 8 / 4),  # a pattern begins behind a point
        ({"r": 16, "rank_pattern": {".*": 4}}, 8 / 4),
        ({"init_lora_weights": "gaussian", "modules_to_save": None, "use_dora": False}, 8 / 4),
    ],
)
def test_b_is_scaled_as_peft_does(folder: Path, stated: dict[str, Any], scale: float) -> None:
    before = load_file(folder / WEIGHTS_NAME)
    state(folder, **stated)
    down, up = read_tensors(read_stated(folder))[LAYER]
    assert torch.equal(down, before[f"base_model.model.{LAYER}.lora_A.weight"])
    assert torch.equal(up, before[f"base_model.model.{LAYER}.lora_B.weight"] * scale)


@pytest.mark.parametrize(
    ("stated", "phrase"),
    [
        ({"peft_type": None}, "peft_type is None"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', not 'LORA'"),
        ({"r": 0}, "the rank 'r' is 0"),
        ({"r": True}, "the rank 'r' is True"),
        ({"lora_alpha": "8"}, "'lora_alpha' is '8', not a number"),
        ({"rank_pattern": {"(": 4}}, "regular expressions"),
        ({"rank_pattern": {"(?i)Q_PROJ": 4}}, "regular expressions"),  # by itself it is one, within PEFT's it is none
        ({"bias": "all"}, "bias='all': it changes biases"),
        ({"use_dora": True}, "use_dora=True: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters="),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
    ],
)
def test_what_is_no_plain_lora_is_refused(folder: Path, stated: dict[str, Any], phrase: str) -> None:
    state(folder, **stated)
    with refused(ModelError, str(folder), phrase):
        read_stated(folder)


def _move(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _set(side: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = f"base_model.model.{LAYER}.lora_{side}.weight"
        tensors[name] = make(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        (_move("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj"), "no layer 'model.layers.7.self_attn.q_proj'"),
        (_move("model.layers.0.self_attn.q_proj", "lm_head"), "no layer 'lm_head' that may have adapters"),
        (_move("lora_A", "lora_embedding_A"), "which is no A or B of a linear layer"),
        (_move("q_proj.lora_B", "q_proj.lora_magnitude_vector"), "which is no A or B"),
        (_set("A", lambda a: a[:, :-1]), f"{LAYER!r} takes 63 numbers to 64, the model's layer 64 to 64"),
        (_set("B", lambda b: b[:-1]), f"{LAYER!r} takes 64 numbers to 63"),
        (_set("A", lambda a: a[:-1]), f"{LAYER!r} is of rank 4 and has A (3, 64) and B (64, 4)"),
        (lambda tensors: tensors.pop(f"base_model.model.{LAYER}.lora_B.weight"), "is of rank 4 and has A"),
        (_set("A", lambda a: a.fill_(math.inf)), "holds NaN, infinity"),
        (lambda tensors: tensors.clear(), "is empty"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(
    folder: Path, adapters: Adapters, changed: Callable[[dict[str, torch.Tensor]], None], phrase: str
) -> None:
    change(folder, changed)
    with refused(ModelError, str(folder), phrase):
        adapters.load("a", folder)
    assert not adapters.loaded
    assert adapters._memory is not None
    assert not any(layer.a.any() or layer.b.any() for layer in adapters._memory.layers.values())


def test_a_rank_beyond_the_room_says_which_would_do(model: Any, adapters: Adapters, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", make_layers(model, ATTENTION, rank=9, seed=0), rank=9, alpha=8)
    with refused(ModelError, "is of rank 9, and there is room for 8", "max_lora_rank=9"):
        adapters.load("a", folder)


def test_damaged_and_absent_files_are_named(folder: Path, adapters: Adapters, tmp_path: Path) -> None:
    with refused(ModelError, f"no {CONFIG_NAME} and no {WEIGHTS_NAME}"):
        adapters.load("a", tmp_path / "absent")
    weights = (folder / WEIGHTS_NAME).read_bytes()
    (folder / WEIGHTS_NAME).write_bytes(weights[:100])
    with refused(ModelError, f"{WEIGHTS_NAME}: "):
        adapters.load("a", folder)
    (folder / CONFIG_NAME).write_text("{")
    with refused(ModelError, f"{CONFIG_NAME} is not JSON"):
        adapters.load("a", folder)
    with refused(UsageError, "the name is empty"):
        adapters.load(" ", folder)


def test_an_adapter_is_told_with_its_rank_and_layers(folder: Path, adapters: Adapters) -> None:
    adapter = adapters.load("a", folder)
    assert (adapter.name, adapter.path, adapter.rank, adapter.num_layers) == ("a", folder, 4, 8)
    assert dict(adapters.loaded) == {"a": adapter}
    other = adapters.load("b", folder)
    assert adapter.slot != other.slot and adapter.cache_salt != other.cache_salt
    adapters.unload("a", ())
    assert adapters.load("c", folder).slot == adapter.slot


def test_what_one_adapter_makes_infinite_stays_with_its_tokens(model: Any) -> None:
    memory = AdapterMemory(model, CPU, 2, 2)
    layer = memory.layers[LAYER]
    layer.a.fill_(1.0)
    layer.b.fill_(1.0)
    layer.a[:2] = 3e38
    memory.begin_step(torch.tensor([0, 1, 2]))
    x, out = torch.ones(1, 3, layer.a.shape[1]), torch.zeros(1, 3, layer.b.shape[0])
    none, first, second = layer.add(x, out)[0]
    assert (none == 0).all() and first.isinf().all() and (second == 2 * layer.a.shape[1]).all()
    memory.end_step()
    assert layer.add(x, out) is out


def taking(multiple: int, **limits: int) -> OpImplementation:
    """Return a kernel of `core::add_lora` that takes ranks that are multiples of a number, and nothing wider."""

    def condition(call: OpCall) -> str | None:
        args = call.args
        assert args["a"].shape[0] % args["rank"] == 0 and args["b"].shape[0] == args["sizes"][0]
        wide = args["x"].shape[-1] > limits.get("features", 10**6)
        return "another one" if args["rank"] % multiple or wide else None

    return OpImplementation(op="core::add_lora", name=f"by {multiple}", fn=torch.ops.core.add_lora, condition=condition)


@pytest.mark.parametrize(
    ("rank", "kernels", "places"),
    [
        (3, [taking(4)], 4),
        (4, [taking(4)], 4),
        (5, [taking(8), taking(2)], 6),
        (3, [], 3),
        (3, [taking(1)], 3),
        (3, [taking(4, features=0)], 3),
        (3, [taking(1, features=64), taking(4)], 4),
        (3, [replace(taking(4), missing="no compiler")], 3),
        (3, [replace(taking(4), op="core::linear")], 3),
        (1, [taking(32)], 1),
    ],
    ids=[
        "up",
        "exact",
        "the least",
        "no kernel",
        "any",
        "none by rank",
        "more layers",
        "missing",
        "of another op",
        "far",
    ],
)
def test_slots_have_the_places_that_a_kernel_takes(rank: int, kernels: Any, places: int, model: Any) -> None:
    memory = AdapterMemory(model, CPU, 2, rank, kernels)
    assert memory.max_rank == rank and {layer.rank for layer in memory.layers.values()} == {places}
    assert {len(layer.a) for layer in memory.layers.values()} == {2 * places}


def test_places_beyond_the_rank_add_nothing(model: Any, tmp_path: Path) -> None:
    layers = make_layers(model, ATTENTION, rank=3, seed=0)
    folder = save_adapter(tmp_path / "adapter", layers, rank=3, alpha=8)
    x, out = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    found = []
    for kernels in ([], [taking(8)]):
        memory = AdapterMemory(model, CPU, 2, 3, kernels)
        held = Adapters(memory)
        held.load("first", folder)
        slot = held.load("second", folder).slot
        layer = memory.layers[LAYER]
        memory.begin_step(torch.tensor([0, slot, 3 - slot]))
        assert layer.a.shape[1] == layer.b.shape[0] == 64 and layer.rank == (8 if kernels else 3)
        found.append(layer.add(x, out))
        memory.end_step()
    torch.testing.assert_close(found[0], found[1])
    assert not torch.equal(found[0][:, 1:], out[:, 1:]) and torch.equal(found[1][:, 0], out[:, 0])


@pytest.mark.parametrize(("model_type", "router"), [("phimoe", "router"), ("llama4_text", "feed_forward.router")])
def test_layers_that_give_more_than_rows_have_no_adapters(model_type: str, router: str) -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=torch.float32).model
    routers = {path for path, each in model.named_modules() if path.endswith(router) and isinstance(each, nn.Linear)}
    found = find_layers(model)
    assert routers and not routers & found.keys()
    assert any(path.endswith("q_proj") for path in found)


def test_layers_of_a_head_that_gets_the_last_tokens_alone_have_no_adapters() -> None:
    found = find_layers(build_model(tiny_config("bert"), torch_device=CPU, dtype=torch.float32).model)
    assert "bert.encoder.layer.1.output.dense" in found
    assert not any(path.startswith("cls.") for path in found)


def test_adapters_of_layers_of_one_input_lie_end_to_end_as_merged_layers_want_them() -> None:
    model = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    layers = AdapterMemory(model, torch.device("cpu"), 2, 4).layers
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        found = [layer for path, layer in layers.items() if ".layers.1." in path and path.endswith(names)]
        for parts in ([layer.a for layer in found], [layer.b for layer in found]):
            assert len(parts) == len(names)
            assert Packing(tuple(parts), tuple(map(len, parts))).packed() is not None
    (alone,) = (layer.a for path, layer in layers.items() if path.endswith(".layers.1.mlp.down_proj"))
    assert alone.untyped_storage().nbytes() == alone.nbytes


def test_the_configuration_is_read_without_torch(folder: Path) -> None:
    code = (
        "import sys; from core.engine.lora.stated import read_stated; "
        "print(read_stated(sys.argv[1]).max_rank, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["4", "False"]
