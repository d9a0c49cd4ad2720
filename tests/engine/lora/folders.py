"""Folders of adapters as PEFT writes them, and models with an adapter merged in."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Layers = dict[str, tuple[Tensor, Tensor]]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_layers(model: nn.Module, names: Iterable[str], *, rank: int, seed: int) -> Layers:
    """Draw A (rank, in) and B (out, rank) fp32 for the linear layers of these names."""
    generator = torch.Generator().manual_seed(seed)
    layers: Layers = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in names:
            size_out, size_in = module.weight.shape  # type: ignore[union-attr, misc]
            down = torch.randn((rank, size_in), generator=generator) * size_in**-0.5
            layers[path] = down, torch.randn((size_out, rank), generator=generator) * 0.3
    assert layers
    return layers


def save_adapter(folder: Path, layers: Layers, *, rank: int, alpha: float, **stated: Any) -> Path:
    """Write what PEFT's save_pretrained does. stated: further fields of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for path, (down, up) in layers.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = down.contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = up.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({path.rpartition(".")[2] for path in layers})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names, "bias": "none", **stated}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def merged(model: Any, layers: Layers, scale: float, dtype: torch.dtype) -> Any:
    """Return a copy of a model in `dtype` with W + scale * B A, summed in fp64, for each layer's W."""
    whole = copy.deepcopy(model).to(torch.float64)
    for path, (down, up) in layers.items():
        weight: Any = whole.get_submodule(path).weight
        weight += scale * up.double() @ down.double()
    return whole.to(dtype)
