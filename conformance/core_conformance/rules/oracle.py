"""The references of a call: the same call in fp64 on the CPU, with inputs rounded as before, and on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from core.verify.execution import Copies, ReferenceMode


def own(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with tensors of their own, for a function that may write into them; sharing is kept."""
    copies = Copies()
    return {name: pytree.tree_map(copies.of, value) for name, value in arguments.items()}


def on_host(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with tensors of their own in the host's memory; dtypes, strides and sharing are kept."""
    copies = Copies(host=True)
    return {name: copies.of(value) for name, value in arguments.items()}


def exact(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the function's result in fp64 on the CPU, and the arguments it ran on, with what it wrote into them."""
    copies = Copies(fp64=True)
    wide = {name: copies.of(value) for name, value in arguments.items()}
    with torch.no_grad(), ReferenceMode():
        return function(**wide), wide


def faked(value: Any, *, sized_by_values: bool = False) -> tuple[FakeTensorMode, Any]:
    """Return a nested structure with its tensors fake, and their mode.

    sized_by_values: sizes may depend on values; they are then symbols.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv() if sized_by_values else None)
    copied = pytree.tree_map_only(Tensor, lambda leaf: mode.from_tensor(leaf, static_shapes=True), value)
    return mode, copied


def with_real_sizes(result: Any, fake: Any) -> Any:
    """Return a fake result; where only a run tells its sizes, it has the real result's, and its strides."""
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
