"""Calls on fake tensors, and how their results compare with real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


def faked(value: Any, *, sized_by_values: bool = False) -> tuple[FakeTensorMode, Any]:
    """Return a nested structure with its tensors fake, and their mode.

    sized_by_values: ops may give sizes that only a run can tell, which are then symbols.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv() if sized_by_values else None)
    copied = pytree.tree_map_only(Tensor, lambda leaf: mode.from_tensor(leaf, static_shapes=True), value)
    return mode, copied


def told(result: Any, fake: Any) -> Any:
    """Return a fake result; sizes that only a run can tell, and then its strides, are those of the real one."""
    if not isinstance(result, Tensor) or not isinstance(fake, Tensor) or result.dim() != fake.dim():
        return fake
    if all(isinstance(size, int) for size in fake.shape):
        return fake
    sizes = [given if isinstance(given, int) else seen for given, seen in zip(fake.shape, result.shape, strict=True)]
    with FakeTensorMode():
        return torch.empty_strided(sizes, result.stride(), dtype=fake.dtype, device=fake.device)


def run_fake(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function gives on fake forms of these arguments."""
    mode, (fake_args, fake_kwargs) = faked((args, dict(kwargs)))
    with torch.no_grad(), mode:
        return function(*fake_args, **fake_kwargs)


def leaves(result: Any) -> list[Any]:
    """Return a result's values in order; nothing for None."""
    return [] if result is None else list(pytree.tree_leaves(result))
