"""Calls on fake tensors, and how their results compare with real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree


def faked(value: Any) -> tuple[FakeTensorMode, Any]:
    """Return a nested structure with its tensors fake, and their mode."""
    mode = FakeTensorMode()
    copied = pytree.tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, value)
    return mode, copied


def run_fake(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function gives on fake forms of these arguments."""
    mode, (fake_args, fake_kwargs) = faked((args, dict(kwargs)))
    with torch.no_grad(), mode:
        return function(*fake_args, **fake_kwargs)


def leaves(result: Any) -> list[Any]:
    """Return a result's values in order; nothing for None."""
    return [] if result is None else list(pytree.tree_leaves(result))
