"""Comparing sizes, symbolic ones among them, without adding a guard: an answer must not narrow what a graph serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true


def expression(size: Any) -> Any:
    """Return a number itself, and of a symbolic one the expression: compared with another it adds no guard."""
    if type(size) is int:
        return size
    found = getattr(getattr(size, "node", None), "expr", None)
    return str(size) if found is None else found


def same_size(left: Any, right: Any) -> bool:
    """Tell whether two sizes are known to be equal; expressions first, since asking about symbols takes long."""
    if left is right or bool(expression(left) == expression(right)):
        return True
    return bool(statically_known_true(left == right))


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Tell whether two shapes, or parts of shapes, are known to be equal."""
    return len(left) == len(right) and all(map(same_size, left, right))
