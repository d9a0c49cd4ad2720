"""Reading `core.quantize` from a graph, for the fusions that end in codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.quantize import QUANTIZE
from core.common.passes import calls, find_op, view

_OPTIONS = ("dtype", "granularity", "group_size")
_BETWEEN = frozenset(
    {"cast", "view", "reshape", "flatten", "unflatten", "contiguous", "transpose", "squeeze", "unsqueeze", "clone"}
)


@dataclass(frozen=True, slots=True)
class Quantize:
    """One call of `core.quantize`: what it reads, and dtype, granularity and group size as an op takes them.

    unknown: names of further arguments, which ops that end in codes do not have.
    """

    node: fx.Node
    x: fx.Node
    scale: fx.Node | None
    options: Mapping[str, Any]
    unknown: tuple[str, ...]


def read_quantize(node: fx.Node) -> Quantize | None:
    """Return the call at a node, or None where it is no `core.quantize` of a node's value."""
    if find_op(node.target) is not QUANTIZE:
        return None
    given = calls.arguments(node, QUANTIZE)
    x, scale = given.pop("x"), given.pop("scale", None)
    options = {name: given.pop(name) for name in _OPTIONS if name in given}
    return Quantize(node, x, scale, options, tuple(given)) if isinstance(x, fx.Node) else None


def behind(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return what casts and views of a value are taken of, and the last of these; the node and None without any."""
    source, last = node, None
    while view.kind(source) in _BETWEEN and isinstance(source.args[0], fx.Node):
        last, source = last or source, source.args[0]
    return source, last
