"""Layers of which each process of a group holds some inputs: what is quantised over all of them takes one scale.

So codes are those of the whole layer, whether a model is quantised before it is cut among processes or after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.common.ops.collective.collectives import ALL_GATHER


def mark_part(layer: nn.Module, group: str, *, has_rows: bool = False) -> None:
    """Note that each process of a group has some of the inputs of a layer, whose results are summed.

    has_rows: whether the rows of weights that it has are whole, as where each process has some of the experts.
    """
    marked: Any = layer
    marked.parts_in, marked.has_rows = group, has_rows


def parts_in(layer: nn.Module) -> str | None:
    """Return the name of the group whose processes each have some of the inputs of a layer; None for a whole layer."""
    found: str | None = getattr(layer, "parts_in", None)
    return found


def columns_in(layer: nn.Module) -> str | None:
    """Return the name of the group whose processes each have some columns of a layer's weight; None where rows are
    whole."""
    return None if getattr(layer, "has_rows", False) else parts_in(layer)


def largest(x: Tensor, group: str | None) -> Tensor:
    """Return the largest of what all processes of a group have at each place of x; x itself for no group."""
    if group is None:
        return x
    gathered: Tensor = ALL_GATHER.overload(x.unsqueeze(0).contiguous(), group, 0)
    return torch.amax(gathered, 0)
