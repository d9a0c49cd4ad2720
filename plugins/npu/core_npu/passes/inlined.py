"""The site of one call of an op with several results, of which the site needs some.

A kernel leaves masked results empty, so the results in use are named one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from core.common.passes import Site

__all__ = ["Caller", "Inputs", "call_site"]

Inputs = dict[str, fx.Node | None]
Caller = Callable[..., fx.Node]
"""Inserts a call of a function, `caller(function, *args, **kwargs)`."""


def call_site(
    inputs: Mapping[str, fx.Node | None],
    call: Callable[[Caller, Inputs], fx.Node],
    outputs: Sequence[tuple[fx.Node, int | None]],
    *,
    interior: Sequence[fx.Node],
    joined: Collection[fx.Node] = (),
    rank: int = 0,
) -> Site:
    """Return the site of a call.

    - inputs: what it reads, by name.
    - call: inserts the call, given a caller and the inputs at that place; None for an argument that is None.
    - outputs: the nodes to replace, the anchor first, each with the result that it becomes; None for the only one.
    - interior: the other nodes that the call replaces.
    - joined: the outputs in which all but the last of `rank` dimensions are joined to one.
    """
    graph = fx.Graph()

    def caller(function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(function, args, kwargs)

    made = call(caller, {name: None if node is None else graph.placeholder(name) for name, node in inputs.items()})
    wanted = dict.fromkeys(index for _, index in outputs)
    results = {index: made if index is None else caller(operator.getitem, made, index) for index in wanted}
    flat = dict.fromkeys(index for old, index in outputs if old in joined)
    rows = {index: caller(torch.flatten, results[index], 0, rank - 2) for index in flat}
    found = [(rows if old in joined else results)[index] for old, index in outputs]
    graph.output(found[0] if len(found) == 1 else tuple(found))
    replaced = tuple(old for old, _ in outputs)
    return Site(
        anchor=replaced[0],
        target=fx.GraphModule(torch.nn.Module(), graph),
        args=tuple(node for node in inputs.values() if node is not None),
        interior=(*interior, *replaced),
        outputs=replaced,
    )
