"""The metadata of a graph's node: its fake value, and where in the model it came from.

Graphs of Dynamo and of AOTAutograd hold fake values under different keys. These functions hide the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

TRACED, ATEN = "example_value", "val"
"""Keys of `node.meta` under which graphs of Dynamo, and graphs of ATen ops, hold fake values."""
ORIGIN = ("nn_module_stack", "stack_trace", "custom")
"""Keys of `node.meta` that say where in the model a node came from; a node that replaces another inherits them."""


def value_of(node: object) -> Any:
    """Return the fake value of a node; None if it is unknown or the argument is no node."""
    meta: Mapping[str, Any] = getattr(node, "meta", {})
    return meta[TRACED] if TRACED in meta else meta.get(ATEN)


def value_key(node: fx.Node) -> str:
    """Return the key under which a node holds its fake value; that of Dynamo where it has none."""
    return ATEN if ATEN in node.meta and TRACED not in node.meta else TRACED


def set_value(node: fx.Node, value: Any, like: fx.Node | None = None) -> None:
    """Give a node a fake value. like: a node of the same graph that has a fake value (by default the node itself)."""
    node.meta[value_key(like or node)] = value


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return the entries of `node.meta` that say where in the model a node came from."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


def describe(node: fx.Node, like: fx.Node, value: Any = None) -> None:
    """Copy the origin of one node to a new one, and give the new node a fake value (None if not known yet)."""
    node.meta.update(origin_of(like))
    if value is not None:
        set_value(node, value, like)
