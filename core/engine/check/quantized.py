"""The yardstick for checks of a model whose layers quantise their inputs: how far apart correct results may be.

An input that lies next to the step between two codes may fall to either side by its last bit. So two right computations
in fp32 that agree to a millionth may still differ by a whole step in some codes. That is rare, and one run of eager
does not show it. It is measured instead: the fp64 computation is repeated with the inputs of every quantised layer
moved by as much as rounding moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core.quantization.layers import QuantizedModule, rounds_inputs

NUM_RUNS = 4
_ROUNDINGS = 8
"""Mean error of a layer's input, in units of its dtype's rounding; each input is a sum of hundreds of terms."""


def widens(model: Any, dtype: torch.dtype) -> bool:
    """Tell whether the yardstick of a model that computes in dtype is wider than eager's own error.

    False in half precision: there inputs cross steps so often that eager's own error contains the effect.
    """
    return dtype.itemsize >= 4 and rounds_inputs(model)


def widened(
    model: Any, eager: Sequence[Tensor], exact: Sequence[Tensor], reference: Callable[[], Sequence[Tensor]]
) -> list[Tensor]:
    """Return logits that are everywhere as far from the exact ones as any correct run may be.

    These are eager's logits, unless the yardstick is wider (`widens`). reference: computes the fp64 logits anew.
    """
    if not widens(model, eager[0].dtype):
        return list(eager)
    errors = [ours.double() - right for ours, right in zip(eager, exact, strict=True)]
    for run in range(NUM_RUNS):
        with _moved(model, seed=run, by=_ROUNDINGS * torch.finfo(eager[0].dtype).eps):
            moved = reference()
        for index, (other, right) in enumerate(zip(moved, exact, strict=True)):
            change = other - right
            errors[index] = torch.where(change.abs() > errors[index].abs(), change, errors[index])
    return [(right + error).to(ours.dtype) for ours, right, error in zip(eager, exact, errors, strict=True)]


@contextmanager
def _moved(model: nn.Module, *, seed: int, by: float) -> Iterator[None]:
    """Perturb the input of each quantised layer (and of its copies) by random amounts up to this relative size."""
    generator = torch.Generator().manual_seed(seed)

    def move(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return (x * (1 + by * noise.to(x.device, x.dtype)), *args[1:])

    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    handles = [layer.register_forward_pre_hook(move) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
