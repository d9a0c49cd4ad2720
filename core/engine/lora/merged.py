"""A model with an adapter merged into its weights: what an engine is judged by that computes it beside them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from core.engine.lora.adapters import Adapter, read_tensors
from core.engine.lora.layers import detach
from core.engine.lora.stated import read_stated
from core.errors import UsageError
from core.quantization.layers import QuantizedLinear, WeightOnlyLinear


def why_not(model: nn.Module, adapter: Adapter) -> str:
    """Return why an adapter can't be merged into a model, "" where it can: codes of quantised layers hold no sum."""
    layers = read_tensors(read_stated(adapter.path))
    quantized = next((p for p in layers if isinstance(model.get_submodule(p), QuantizedLinear | WeightOnlyLinear)), "")
    return f"{quantized!r} is quantised, and its codes hold no sum of two weights" if quantized else ""


@torch.no_grad()
def merged_model(model: nn.Module, adapter: Adapter, *, exact: bool = False) -> nn.Module:
    """Return a copy of a model with W + B A for each layer of an adapter, B scaled; summed in fp64.

    The sums are rounded to the weights' dtype; exact: the whole copy is fp64, and they are not. The copy has no
    adapters beside its layers. Raises `UsageError` where `why_not` says why.
    """
    layers = read_tensors(read_stated(adapter.path))
    if found := why_not(model, adapter):
        raise UsageError(f"merging adapter {adapter.name!r}", found=found, remedy="merge it before quantising")
    whole = copy.deepcopy(model)
    detach(whole, [path for path, _ in whole.named_modules()])
    for path, (down, up) in layers.items():
        module: Any = whole.get_submodule(path)
        added = up.double() @ down.double()
        added = added if isinstance(module, nn.Linear) else added.T  # GPT-2 keeps (in, out)
        total = module.weight.double() + added.to(module.weight.device)
        module.weight = nn.Parameter(total if exact else total.to(module.weight.dtype), requires_grad=False)
    return whole.double() if exact else whole
