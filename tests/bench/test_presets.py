"""Presets: the numbers of parameters are those of the models they are named after, and the weights are sane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench.model import find, open_model, preset_dtype
from core.bench.presets import PRESETS, find_preset, random_model
from core.device import Capabilities
from core.engine.models.sharding import shard_model
from core.errors import ModelError, UsageError
from tests.common.processes import pretended
from tests.support import cpu, refused


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-1b", 1.2358),
        ("llama-8b", 8.0303),
        ("qwen3-0.6b", 0.5960),
        ("qwen3-8b", 8.1907),
        ("qwen3-30b-a3b", 30.5321),
    ],
)
def test_a_preset_has_the_parameters_of_its_model(name: str, billions: float) -> None:
    preset = PRESETS[name]
    loaded = random_model(preset.config(), torch_device=torch.device("meta"), dtype=preset.dtype)
    assert loaded.num_parameters / 1e9 == pytest.approx(billions, abs=1e-4)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_weights_are_drawn_by_the_seed_and_leave_the_hosts_random_state() -> None:
    config = PRESETS["tiny-qwen3"].config()
    state = torch.get_rng_state()
    first, second, other = (
        random_model(config, torch_device=torch.device("cpu"), dtype=torch.float32, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    weights = [dict(loaded.model.named_parameters()) for loaded in (first, second, other)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])
    # Of no norm are all weights the same: a graph that leaves a norm's weight out would be right by chance.
    assert all(weight.std() > 0.05 for weight in weights[0].values())
    assert weights[0]["lm_head.weight"].std() == pytest.approx(64**-0.5, rel=0.05)
    assert all(not p.requires_grad for p in first.model.parameters())


def test_an_unknown_preset_names_the_close_one() -> None:
    with refused(UsageError, "--preset 'lama-8b'", "qwen3-30b-a3b", "did you mean 'llama-8b'"):
        find_preset("lama-8b")


def test_a_config_file_is_a_preset_with_random_weights(tmp_path: Path) -> None:
    config = PRESETS["tiny-moe"].config()
    config.dtype = torch.float16
    (tmp_path / "config.json").write_text(config.to_json_string())
    preset = find_preset(str(tmp_path / "config.json"))
    assert (preset.name, preset.model_type, preset.dtype) == (tmp_path.name, "qwen3_moe", torch.float16)
    made, title = open_model(None, str(tmp_path / "config.json"), cpu(), "float32")
    assert title == f"{tmp_path.name}, random weights"
    assert (
        made.num_parameters
        == random_model(config, torch_device=torch.device("meta"), dtype=torch.float32).num_parameters
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"model_type": "nothing_known"}', "nothing_known"),
        ('{"hidden_size": 64}', "model_type"),
        ("[1, 2]", "TypeError"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ("{", "JSONDecodeError"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_file_that_states_no_model_is_refused(tmp_path: Path, text: str | None, found: str) -> None:
    path = tmp_path / "shape.json"
    if text is not None:
        path.write_text(text)
    with refused(ModelError, "shape.json", found, "config.json of a model type"):
        find_preset(str(path))


def test_a_model_and_a_preset_are_one_too_many() -> None:
    with refused(UsageError, "two models"):
        find("llama", "llama-1b")
    assert find("llama", None) is None


def test_dtypes_of_a_preset() -> None:
    narrow = cpu()
    assert preset_dtype(PRESETS["llama-8b"], narrow, "float32") is torch.float32
    capabilities = Capabilities(device_name="x", dtypes=frozenset({torch.float32, torch.float64}))
    parts = type(narrow.parts)(torch_device=narrow.torch_device, capabilities=capabilities, memory=narrow.parts.memory)
    assert preset_dtype(PRESETS["llama-8b"], cpu(parts=parts), "auto") is torch.float32
    assert open_model(None, "tiny-llama", narrow, "auto")[0].dtype is torch.float32


@pytest.mark.cases(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-moe"])
def test_a_rank_draws_its_part_of_the_model_that_one_process_draws(name: str, rank: int) -> None:
    preset = PRESETS[name]
    how: dict[str, Any] = {"torch_device": torch.device("cpu"), "dtype": torch.float32}
    whole = random_model(preset.config(), **how)
    with pretended(rank=rank):
        part = random_model(preset.config(), **how, sharded=True)
        shard_model(whole.model)
    assert part.num_parameters == whole.num_parameters
    held = dict(part.model.named_parameters(remove_duplicate=False))
    assert held.keys() == dict(whole.model.named_parameters(remove_duplicate=False)).keys()
    assert sum(p.numel() for p in part.model.parameters()) < 0.6 * part.num_parameters
    assert all(torch.equal(held[key], each) for key, each in whole.model.named_parameters(remove_duplicate=False))
    tied = part.config.tie_word_embeddings
    assert (held["lm_head.weight"] is held["model.embed_tokens.weight"]) == tied
