"""Makes the site of `core::dense_attention` from a matched attention, with the views that its operands still need."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from core.common.ops.attention import DENSE_ATTENTION
from core.common.passes import Refused, Site, same_size, same_sizes, view
from core.common.passes.attention.operands import Operand
from core.common.passes.attention.scores import Mask


@dataclass(slots=True)
class Attention:
    """A matched attention: `anchor` holds its result; heads: H, None if the scores have only three dimensions.

    result: methods that turn the op's result into the anchor's value. nodes: the interior, without the nodes that
    compute the operands.
    """

    anchor: fx.Node
    query: Operand
    key: Operand
    value: Operand
    scale: float
    heads: Any = None
    softcap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    sinks: Operand | None = None
    causal: bool = False
    result: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Query, key and value."""
        return self.query, self.key, self.value


def site_of(found: Attention) -> Site:
    """Return the site; raises `Refused` where heads or sizes do not fit the op."""
    _bring_to_four(found)
    _check_sizes(found)
    nodes = [*found.nodes, found.anchor, *(node for operand in found.operands for node in operand.nodes)]
    nodes += found.sinks.nodes if found.sinks is not None else []
    interior = tuple(dict.fromkeys(nodes))
    masks = [(mask, _mask_steps(mask, found.heads)) for mask in found.masks]
    options = _options(found)
    plain = len(masks) <= 1 and all(mask.factor == 1 and _is_as_is(mask) and not steps for mask, steps in masks)
    if plain and not found.result and not any(operand.steps for operand in found.operands):
        if masks:
            options["mask"] = masks[0][0].node
        if found.sinks is not None:
            options["sinks"] = found.sinks.node
        args = tuple(operand.node for operand in found.operands)
        return Site(anchor=found.anchor, target=DENSE_ATTENTION.overload, args=args, kwargs=options, interior=interior)
    inputs, graph = _graph(found, masks, options)
    return Site(anchor=found.anchor, target=graph, args=inputs, interior=interior)


def _options(found: Attention) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": found.scale}
    if found.causal:
        options["causal"] = True
    if found.softcap:
        options["softcap"] = found.softcap
    if view.dtype(found.anchor) != view.dtype(found.value.node):
        options["out_dtype"] = view.dtype(found.anchor)
    return options


def _bring_to_four(found: Attention) -> None:
    """Add a dimension of heads to query, key and value that have none."""
    ranks = [len(view.shape(operand.node) or ()) for operand in found.operands]
    for operand, rank in zip(found.operands, ranks, strict=True):
        if rank == 3 and found.heads is not None:
            operand.then("unflatten", 0, (-1, found.heads))
        elif rank == 3:
            operand.then("unsqueeze", 1)
        elif rank != 4:
            raise Refused(operand.node, f"{operand.node} has {rank} dimensions")
    if found.heads is None and set(ranks) == {3}:
        found.result.append(("squeeze", (1,)))


def _check_sizes(found: Attention) -> None:
    sizes = [_four(operand, found.heads) for operand in found.operands]
    query, key, value = sizes
    if found.heads is not None and not same_size(query[1], found.heads):
        raise Refused(found.query.node, f"the scores have {found.heads} heads, {found.query.node} has {query[1]}")
    fits = same_sizes(key[1:2], value[1:2]) and statically_known_true(query[1] % key[1] == 0)
    if not fits:
        reason = f"{query[1]} query heads, {key[1]} key heads and {value[1]} value heads do not fit together"
        raise Refused(found.anchor, reason)
    if not same_sizes((query[0], query[0]), (key[0], value[0])):
        raise Refused(found.anchor, f"batch sizes {query[0]}, {key[0]} and {value[0]} differ")


def _four(operand: Operand, heads: Any) -> tuple[Any, ...]:
    sizes = view.shape(operand.node) or ()
    orders = [args for method, args in operand.steps if method == "permute"]
    if len(sizes) == 4:
        return tuple(sizes[dim] for dim in orders[0]) if orders else sizes
    return (sizes[0], 1, *sizes[1:]) if heads is None else (sizes[0] // heads, heads, *sizes[1:])


def _is_as_is(mask: Mask) -> bool:
    return mask.shown is None or (mask.shown and mask.fill == -float("inf"))


def _mask_steps(mask: Mask, heads: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the views that give a mask of three-dimensional scores a fourth dimension."""
    sizes = view.shape(mask.node) or ()
    if len(sizes) > mask.rank:
        raise Refused(mask.node, f"{mask.node} has {len(sizes)} dimensions, the scores have {mask.rank}")
    if mask.rank == 4 or len(sizes) < 3:
        return []
    if heads is None:
        return [("unsqueeze", (1,))]
    return [] if same_size(sizes[0], 1) else [("unflatten", (0, (-1, heads)))]


_Steps = Sequence[tuple[str, tuple[Any, ...]]]


def _graph(
    found: Attention, masks: Sequence[tuple[Mask, _Steps]], options: dict[str, Any]
) -> tuple[tuple[fx.Node, ...], fx.GraphModule]:
    """Return the op together with the preparation of its operands as one graph, and the nodes that this graph reads."""
    graph = fx.Graph()
    sources = [*(operand.node for operand in found.operands), *(mask.node for mask, _ in masks)]
    sources += [found.sinks.node] if found.sinks is not None else []
    inputs = {node: graph.placeholder(f"input_{at}") for at, node in enumerate(dict.fromkeys(sources))}

    def prepared(node: fx.Node, steps: _Steps) -> fx.Node:
        current = inputs.get(node, node)
        for method, args in steps:
            current = graph.call_method(method, (current, *args))
        return current

    args = tuple(prepared(operand.node, operand.steps) for operand in found.operands)
    mask = _sum(graph, [_as_op_takes(graph, mask, prepared(mask.node, steps), masks) for mask, steps in masks])
    if mask is not None:
        options["mask"] = mask
    if found.sinks is not None:
        options["sinks"] = prepared(found.sinks.node, found.sinks.steps)
    graph.output(prepared(graph.call_function(DENSE_ATTENTION.overload, args, options), found.result))
    return tuple(inputs), fx.GraphModule(torch.nn.Module(), graph)


def _as_op_takes(graph: fx.Graph, mask: Mask, node: fx.Node, masks: Sequence[object]) -> fx.Node:
    """Return an additive mask, or a boolean mask if it is the only one and nothing can unhide what it hides."""
    if mask.shown is None:
        return node if mask.factor == 1 else graph.call_function(operator.mul, (node, mask.factor))
    if len(masks) == 1 and mask.fill == -float("inf"):
        return node if mask.shown else graph.call_function(torch.logical_not, (node,))
    values = (0.0, mask.fill) if mask.shown else (mask.fill, 0.0)
    return graph.call_function(torch.where, (node, *values))


def _sum(graph: fx.Graph, masks: Sequence[fx.Node]) -> fx.Node | None:
    total: fx.Node | None = None
    for mask in masks:
        total = mask if total is None else graph.call_function(operator.add, (total, mask))
    return total
