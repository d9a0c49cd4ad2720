"""Small quantised checkpoints and edits of them that the tests of loading share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors", reason="needs the extra 'hf'")

from safetensors.torch import load_file, save_file

import core
from core.quantization.save import save
from tests.engine.models.folders import IDS, LLAMA, make_llama, transformers

Q = "model.layers.0.self_attn.q_proj"
MOE = {**LLAMA, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def make_moe() -> Any:
    from core.engine.models.loading import build_model

    return build_model(transformers.Qwen3MoeConfig(**MOE), torch_device=torch.device("cpu")).model


def make_nemotron() -> Any:
    """Return a tiny Nemotron-H, whose experts have no gate, and whose files have other names than the model."""
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config

    return build_model(tiny_config("nemotron_h", moe_latent_size=32), torch_device=torch.device("cpu")).model


def quantized_folder(path: Path, scheme: str, make: Callable[[], Any] = make_llama, **options: Any) -> Path:
    return save(core.quantize(make(), scheme, calibration=[IDS], **options), path)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))
