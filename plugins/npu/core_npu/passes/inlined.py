"""Small graphs that take a site's place: a call of an op of several results, of which the site needs some.

A masked result of a kernel holds nothing that anybody may read, so an op's results are named one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["Builder", "replacement"]


class Builder:
    """Makes the nodes of a replacement; what it is given and gives are nodes of that graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Call a function."""
        return self.graph.call_function(target, args, kwargs)

    def member(self, call: fx.Node, index: int) -> fx.Node:
        """Read one result off a call."""
        return self.call(operator.getitem, call, index)


def replacement(
    args: Mapping[str, fx.Node | None], build: Callable[[Builder, dict[str, fx.Node | None]], Sequence[fx.Node]]
) -> tuple[fx.GraphModule, tuple[fx.Node, ...]]:
    """Return a graph for `Site.target` and its arguments, those of `args` that are nodes, in order.

    build: gets the graph's inputs by the same names, None where the argument is, and returns what the site's results
    become.
    """
    builder = Builder()
    inputs = {name: None if node is None else builder.graph.placeholder(name) for name, node in args.items()}
    results = build(builder, inputs)
    builder.graph.output(results[0] if len(results) == 1 else tuple(results))
    given = tuple(node for node in args.values() if node is not None)
    return fx.GraphModule(torch.nn.Module(), builder.graph), given
