"""The error that quantising a layer introduces: relative rms of its weights and of its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.quantization.layers import QuantizedModule
from core.quantization.make import weights_of

Make = Callable[[str, nn.Module], QuantizedModule]
"""Returns the quantised form of a layer, by its path."""


class SquareSums:
    """Sums of squares, of errors and of what they are relative to."""

    def __init__(self) -> None:
        self.error = self.size = 0.0

    def add(self, result: Tensor, exact: Tensor) -> None:
        """Add those of one result; exact: what it should be."""
        # fp64: millions of squares of half precision are summed.
        self.error += float((result.double() - exact.double()).square().sum())
        self.size += float(exact.double().square().sum())

    @property
    def relative(self) -> float:
        """The rms of the errors over that of what they are relative to."""
        return math.sqrt(self.error / self.size) if self.size else 0.0 if self.error == 0 else math.inf


def weight_error(layer: nn.Module, quantized: QuantizedModule) -> float:
    """Return the rms of the error of a quantised layer's weights over the rms of the weights."""
    sums = SquareSums()
    for exact, values in zip(weights_of(layer), quantized.values(), strict=True):
        sums.add(values, exact)
    return sums.relative


class OutputErrors:
    """A hook for the calls of the layers of a model that is not quantised yet: compares with the quantised layer.

    Each layer is measured alone, on the inputs that it has in the exact model. One quantised layer exists at a time.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._sums: dict[str, SquareSums] = {}

    def __call__(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Measure one call; of a layer that is cut among processes, the part of this one."""
        with torch.no_grad():
            is_part = len(module._forward_hooks) > 1  # what is summed or gathered afterwards is no output of the layer
            exact = module.forward(*args) if is_part else output
            self._sums.setdefault(name, SquareSums()).add(self._make(name, module)(*args), exact)

    def relative(self, name: str) -> float | None:
        """Return the rms of the error of a layer's outputs over that of the outputs; None where it was not called."""
        sums = self._sums.get(name)
        return None if sums is None else sums.relative
