"""Write a quantised model as a compressed-tensors checkpoint, which this and other engines read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UsageError
from core.quantization.config import make_config
from core.quantization.experts import QuantizedExperts
from core.quantization.layers import QuantizedLinear, QuantizedModule, WeightOnlyLinear
from core.quantization.report import report_of
from core.quantization.scheme import FP8, QuantizationScheme
from core.quantization.targets import is_experts, is_router
from core.quantization.tensors import CACHE_SCALE_NAMES
from core.quantization.weights import Weight, pack


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a quantised transformers model to a folder, with its configuration, and return the folder.

    Experts are written as linear layers of their own, one scale of static inputs for all. A tokenizer is not part of a
    model: save it there too. Raises `UsageError` for a model that is not quantised or is none of transformers.
    """
    folder = Path(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedModule)}
    write: Any = getattr(model, "save_pretrained", None)
    if not layers or write is None:
        raise UsageError(
            f"save a {type(model).__name__} to {str(folder)!r}",
            found="it has no quantised layer" if write is not None else "it is no transformers model",
            remedy="quantise a transformers model first: core.quantize(model, 'fp8')",
        )
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not any(name.startswith(f"{layer}.") for layer in layers)
    }
    by_scheme: dict[QuantizationScheme, list[str]] = {}
    for name, layer in layers.items():
        for each, stored in _layers_of(name, layer):
            by_scheme.setdefault(layer.scheme, []).append(each)
            tensors |= {f"{each}.{part}": tensor for part, tensor in stored.items()}
    scales = _cache_scales(model)
    write(folder, state_dict=tensors | scales)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = make_config(by_scheme, _ignored(model), cache_strategy=_cache_strategy(scales))
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _cache_scales(model: nn.Module) -> dict[str, Tensor]:
    """Return the scales of quantised keys and values that attention modules have, by the names of checkpoints."""
    return {
        f"{path}.{name}": _own(torch.as_tensor(scale, dtype=torch.float32).reshape(-1))
        for path, module in model.named_modules()
        for name in CACHE_SCALE_NAMES
        if (scale := getattr(module, name, None)) is not None
    }


def _cache_strategy(scales: Mapping[str, Tensor]) -> str:
    """Return what these scales are: of a whole cache, of each of its heads, or none at all."""
    sizes = [scale.numel() for scale in scales.values()]
    return "" if not sizes else "tensor" if max(sizes) == 1 else "attn_head"


def _ignored(model: nn.Module) -> list[str]:
    """Return paths, or expressions for experts, of the linear layers that are not quantised."""
    report = report_of(model)
    names = {each.name for each in report.ignored} if report is not None else set()
    # Where this model has a module of its own for a router, others may have a linear layer.
    names |= {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) or is_router(name, module)
    }
    experts = {name for name in names if is_experts(model.get_submodule(name))}
    return [*sorted(names - experts), *(rf"re:{re.escape(name)}\..*" for name in sorted(experts))]


def _layers_of(name: str, layer: QuantizedModule) -> list[tuple[str, dict[str, Tensor]]]:
    """Return path and tensors of each linear layer that the module at path name is stored as."""
    if isinstance(layer, QuantizedExperts):
        return _experts(name, layer)
    assert isinstance(layer, QuantizedLinear | WeightOnlyLinear)
    weight = Weight(codes=layer.weight, scale=layer.weight_scale, zero_point=layer.weight_zero_point)
    inputs = (layer.input_scale, layer.input_zero_point) if isinstance(layer, QuantizedLinear) else ()
    return [(name, stored_weight(layer.scheme, weight, layer.in_features) | _rest(layer.bias, *inputs))]


def _experts(name: str, layer: QuantizedExperts) -> list[tuple[str, dict[str, Tensor]]]:
    inner, hidden = layer.intermediate_dim, layer.hidden_dim
    up, down = layer.weight(layer.up_name), layer.weight("down_proj")
    names = ("gate_proj", "up_proj") if layer.has_gate else ("up_proj",)
    inputs = _rest(None, layer.input_scale, layer.input_zero_point)
    hidden_inputs = _rest(None, layer.hidden_scale, layer.hidden_zero_point)
    found = []
    for expert in range(layer.num_experts):
        for part, weight, rows, num_inputs, scales in (
            *((part, up, slice(i * inner, (i + 1) * inner), hidden, inputs) for i, part in enumerate(names)),
            ("down_proj", down, slice(0, hidden), inner, hidden_inputs),
        ):
            zero_point = None if weight.zero_point is None else weight.zero_point[expert, rows]
            own = Weight(codes=weight.codes[expert, rows], scale=weight.scale[expert, rows], zero_point=zero_point)
            stored = stored_weight(layer.scheme, own, num_inputs)
            found.append((f"{name}.{expert}.{part}", stored | {n: t.clone() for n, t in scales.items()}))
    return found


def _rest(bias: Tensor | None, scale: Tensor | None = None, zero_point: Tensor | None = None) -> dict[str, Tensor]:
    named = {"bias": bias, "input_scale": scale, "input_zero_point": zero_point}
    return {
        name: _own(tensor if name == "bias" else tensor.reshape(1))
        for name, tensor in named.items()
        if tensor is not None
    }


def stored_weight(scheme: QuantizationScheme, weight: Weight, num_inputs: int) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint has of one layer's weight (N, K), each with memory of its own."""
    num_bits, zero_point = scheme.weights.num_bits, weight.zero_point
    tensors = {"weight_scale": weight.scale}
    if scheme.activations is not None or scheme.weights.dtype == FP8:
        tensors["weight"] = weight.codes
    else:
        tensors["weight_packed"] = weight.codes if num_bits < 8 else pack(weight.codes, num_bits)
        tensors["weight_shape"] = torch.tensor([weight.codes.shape[0], num_inputs])
        zero_point = None if zero_point is None else pack(zero_point.t(), num_bits).t()
    if zero_point is not None:
        tensors["weight_zero_point"] = zero_point
    return {name: _own(tensor) for name, tensor in tensors.items()}


def _own(tensor: Tensor) -> Tensor:
    """Return a copy on the host: tensors that share memory cannot be written to one file."""
    return tensor.detach().to("cpu", copy=True).contiguous()
