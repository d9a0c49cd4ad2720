"""core/engine/lora/merged.py: a copy with the adapter in its weights, and `core run --lora` judged by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.cli import main
from core.engine.lora.adapters import Adapter
from core.engine.lora.merged import merged_model, why_not
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model, load_model
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from core.quantization.quantize import quantize
from tests.engine.lora.folders import ATTENTION, MLP, make_layers, merged, save_adapter
from tests.support import refused


def adapter_of(folder: Path) -> Adapter:
    return Adapter(name="one", path=folder, rank=4, num_layers=1, slot=1, cache_salt=b"")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_the_sums_and_the_model_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=dtype).model
    layers = make_layers(model, ATTENTION + MLP, rank=4, seed=0)
    adapter = adapter_of(save_adapter(tmp_path / "one", layers, rank=4, alpha=8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for exact, wanted in ((False, dtype), (True, torch.float64)):
        found = merged_model(model, adapter, exact=exact).state_dict()
        expected = merged(model, layers, 2.0, wanted).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_quantised_layers_can_not_be_merged(tmp_path: Path) -> None:
    model = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    layers = make_layers(model, ATTENTION, rank=4, seed=0)
    adapter = adapter_of(save_adapter(tmp_path / "one", layers, rank=4, alpha=8))
    assert why_not(model, adapter) == ""
    quantize(model, "int8")
    with refused(UsageError, "is quantised, and its codes hold no sum"):
        merged_model(model, adapter)


@pytest.mark.slow
def test_core_run_generates_with_an_adapter_and_judges_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = load_model(embedded_model(), torch_device=torch.device("cpu")).model
    folder = save_adapter(tmp_path / "one", make_layers(model, ATTENTION, rank=4, seed=0), rank=4, alpha=4)
    run = ["run", "--device", "cpu", "--lowering", "inline", "--max-new-tokens", "8", "--json"]
    assert main(run) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*run, "--lora", str(folder)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["check"]["passed"] and document["check"]["verdict"]["passed"]
    assert document["model"]["adapters"] == [str(folder)]
    assert plain["model"]["adapters"] == []
    assert document["completions"][0]["token_ids"] != plain["completions"][0]["token_ids"]


def test_core_run_refuses_a_folder_without_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--device", "cpu", "--lora", str(tmp_path / "none")]) != 0
    assert "none" in capsys.readouterr().err
