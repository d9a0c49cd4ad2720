"""Kernels of one expression each, registered from tables: a name, its specification, and the formula it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from simulator.marshal import kernel

Formula = Callable[..., Any]
Formulas = Mapping[str, tuple[str, Formula]]
"""Name without `aclnn` -> specification (marshal.py) and formula of the inputs in its order."""


def _store(function: Formula, num_outputs: int, typed: bool, *arguments: Any) -> None:
    inputs, outputs = arguments[:-num_outputs], arguments[-num_outputs:]
    results = function(*inputs, dtype=outputs[0].dtype) if typed else function(*inputs)
    for out, result in zip(outputs, results if num_outputs > 1 else (results,), strict=True):
        out.copy_(result.reshape(out.shape))


def _overwrite(function: Formula, x: Tensor, *others: Any) -> None:
    x.copy_(function(x, *others))


def stored(formulas: Formulas, num_outputs: int = 1, *, typed: bool = False) -> None:
    """Register kernels whose last arguments take the results. typed: the formula gets the first output's `dtype`."""
    for name, (spec, function) in formulas.items():
        kernel(f"aclnn{name}", spec)(partial(_store, function, num_outputs, typed))


def in_place(formulas: Formulas) -> None:
    """Register kernels `aclnnInplace…`, whose first argument takes the result."""
    for name, (spec, function) in formulas.items():
        kernel(f"aclnnInplace{name}", spec)(partial(_overwrite, function))


def both(formulas: Formulas) -> None:
    """Register each formula twice: as specified, and in place, without the output."""
    stored(formulas)
    in_place({name: (spec[:-1], function) for name, (spec, function) in formulas.items()})
