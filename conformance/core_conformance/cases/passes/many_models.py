"""Models in which a pass has many sites, and rows of them past 8,192 columns; and a sample's model several times over.

State that a pass carries between sites needs many sites to show, and faults of kernels in wide rows need wide rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_conformance.cases.passes.models import EPSILONS, Built, Parts, RmsNorm, perturb

NUM_SITES = 6
"""The least number of sites in each of these models."""
WIDTH = 8704
"""Past 8,192, and a multiple of 128 and 512 and no power of two."""
_TOKENS = 2


class Repeated(nn.Module):
    """Several copies of a model, each with weights and inputs of its own."""

    def __init__(self, model: nn.Module, count: int, num_inputs: int) -> None:
        super().__init__()
        self.models = nn.ModuleList(perturb(deepcopy(model), seed) for seed in range(count))
        self.num_inputs = num_inputs

    def forward(self, *inputs: Tensor) -> Any:
        """Return each copy's outputs for its inputs."""
        given = [inputs[start : start + self.num_inputs] for start in range(0, len(inputs), self.num_inputs)]
        return tuple(model(*each) for model, each in zip(self.models, given, strict=True))


def repeated(build: Callable[[], Built], count: int = NUM_SITES) -> Built:
    """Return a model's copies side by side; each but the first has its floating inputs turned round, row by row."""
    model, inputs = build()
    named = {
        f"{name}_{copy}": value if not copy else _another(value, copy)
        for copy in range(count)
        for name, value in inputs.items()
    }
    return Repeated(model, count, len(inputs)), named


def _another(value: Tensor, copy: int) -> Tensor:
    if not value.is_floating_point() or not value.dim():
        return value.clone()
    return value.roll(copy, -1).clone()


def _wide_norms(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Norm wide rows by weights of their own, by each eps twice, and add a residual before half of them."""
    plain = [norm(x) for norm in model.norms[: len(EPSILONS)]]
    total = x
    for norm in model.norms[len(EPSILONS) :]:
        total = total + x.sin()
        plain.append(norm(total))
    return (*plain, total)


def _wide_layer_norms(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Norm wide rows by modules."""
    return tuple(norm(x) for norm in model.norms)


def _wide_gates(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Gate wide rows by each activation, from halves of one row and from two."""
    results = []
    activations: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.gelu) * (NUM_SITES // 2)
    for index, activation in enumerate(activations):
        gate, up = torch.cat((x.roll(index, -1), x.flip(-1)), -1).chunk(2, -1) if index % 2 else (x * (index + 1), x)
        results.append(activation(gate) * up)
    return tuple(results)


def _wide_caps(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Cap wide rows of logits, each time at another height."""
    return tuple(cap * torch.tanh(x / cap) for cap in (3.0, 1.5, 5.0, 7.0, 2.0, 4.0))


def _wide(scale: float = 1.0) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(17)
    return {"x": torch.randn(_TOKENS, WIDTH, generator=generator) * scale}


WIDE_MODELS: Mapping[str, Callable[[], Built]] = MappingProxyType(
    {
        "wide-norms": lambda: (
            Parts(_wide_norms, norms=nn.ModuleList(RmsNorm(WIDTH, eps) for eps in EPSILONS * 2)),
            _wide(0.1),
        ),
        "wide-layer-norms": lambda: (
            Parts(_wide_layer_norms, norms=nn.ModuleList(nn.LayerNorm(WIDTH, eps=eps) for eps in EPSILONS * 2)),
            _wide(0.3),
        ),
        "wide-gates": lambda: (Parts(_wide_gates), _wide(2.0)),
        "wide-soft-caps": lambda: (Parts(_wide_caps), _wide(6.0)),
    }
)
"""Name -> what builds the model and its inputs by name, as in `models.MODELS`."""
