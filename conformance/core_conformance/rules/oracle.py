"""The fp64 reference: a function run on the CPU in fp64, on inputs that keep the rounding they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
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
