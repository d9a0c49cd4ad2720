"""Fuse all-gathers with the linear layer after them, and linear layers with the reduce-scatter after them.

A kernel of `core::all_gather_linear` or `core::linear_reduce_scatter` may exchange one part of the tokens while it
computes another: asynchronous tensor parallelism. The collectives come from `sequence_parallel` or from the model
itself. On a device without these ops, the original nodes are put back.

A gated linear layer that reads what is gathered becomes the product, with its all-gather, and the gate; only where the
device has the op, since that form can't be put back.
"""

from __future__ import annotations

import operator
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from core.common.ops.canonical import (
    ALL_GATHER,
    ALL_GATHER_LINEAR,
    GATED_ACTIVATION_FUSED,
    GATED_LINEAR,
    LINEAR,
    LINEAR_REDUCE_SCATTER,
    REDUCE_SCATTER,
)
from core.common.passes import Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss, view
from core.common.passes.collective.limits import call_of, refused_bytes, refused_group
from core.common.passes.linear.lift import linear_operands


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return an all-gather or a reduce-scatter with the linear layer next to it."""
    gathered, scattered = call_of(node, ALL_GATHER), call_of(node, REDUCE_SCATTER)
    given = gathered or scattered
    if given is None:
        return None
    group = str(given["group"])
    reason = refused_group(context, group) or refused_bytes(context, group, node if gathered else given["x"])
    if not reason and given["dim"] in (-1, len(view.shape(node) or ()) - 1):
        reason = "it is along the features, not the tokens"
    if reason:
        return near_miss(node, reason)
    return _gather(context, node, given) if gathered else _scatter(context, node, given)


def _gather(context: PassContext, node: fx.Node, given: dict[str, Any]) -> Site | NearMiss:
    """Return the all-gather with the first linear layer that reads it; others read the op's second result."""
    free = [user for user in node.users if user not in context.taken]
    linear = next((user for user in free if _reads(user, node)), None)
    if linear is None and ALL_GATHER_LINEAR.qualified_name in (context.implemented or ()):
        linear = next((user for user in free if _gated(user, node)), None)
    if linear is None:
        return near_miss(node, f"no linear layer reads {node}")
    context.taken.add(linear)
    if gate := _gated(linear, node):
        return _gather_gated(node, linear, given, gate)
    _, weight, bias = linear_operands(linear)
    return Site(
        anchor=linear,
        target=ALL_GATHER_LINEAR.overload,
        args=(given["x"], weight, bias, given["group"], given["dim"], given["size"]),
        interior=(node, linear),
        outputs=(linear, node),
    )


def _gather_gated(node: fx.Node, gated: fx.Node, given: dict[str, Any], gate: dict[str, Any]) -> Site:
    """Return the all-gather with a gated linear layer, whose gate becomes an op of its own behind the product."""
    operands = (given["x"], gate.pop("weight"), gate.pop("bias"), given["group"], given["dim"], given["size"])
    inputs = tuple(dict.fromkeys(each for each in operands if isinstance(each, fx.Node)))
    graph = fx.Graph()
    known: dict[Any, fx.Node] = {each: graph.placeholder(each.name) for each in inputs}
    both = graph.call_function(ALL_GATHER_LINEAR.overload, tuple(known.get(each, each) for each in operands))
    product = graph.call_function(operator.getitem, (both, 0))
    results = [graph.call_function(GATED_ACTIVATION_FUSED.overload, (product,), gate)]
    is_read = len(node.users) > 1
    if is_read:
        results.append(graph.call_function(operator.getitem, (both, 1)))
    graph.output(tuple(results) if is_read else results[0])
    return Site(
        anchor=gated,
        target=fx.GraphModule(nn.Module(), graph),
        args=inputs,
        interior=(node, gated),
        outputs=(gated, node) if is_read else (gated,),
    )


def _scatter(context: PassContext, node: fx.Node, given: dict[str, Any]) -> Site | NearMiss:
    linear = given["x"]
    if not isinstance(linear, fx.Node) or not _is_linear(linear):
        return near_miss(node, f"{linear}, which is reduced, is no linear layer's")
    if linear in context.taken or view.only_user(linear) is not node:
        why = "belongs to an all-gather" if linear in context.taken else "is read by others too"
        return near_miss(node, f"{linear} {why}")
    context.taken.add(linear)
    return Site(
        anchor=node,
        target=LINEAR_REDUCE_SCATTER.overload,
        args=(*linear_operands(linear), given["group"], given["dim"]),
        interior=(linear, node),
    )


def _is_linear(node: fx.Node) -> bool:
    weight = linear_operands(node)[1]
    return (view.kind(node) == "linear" or node.target is LINEAR.overload) and len(view.shape(weight) or ()) == 2


def _reads(node: fx.Node, x: fx.Node) -> bool:
    """Tell whether a node is a linear layer of x that reads x only as its input."""
    first, weight, bias = linear_operands(node) if _is_linear(node) else (None, None, None)
    return first is x and x not in (weight, bias)


def _gated(node: fx.Node, x: fx.Node) -> dict[str, Any]:
    """Return the arguments by name, less x, of a gated linear layer that reads x only as its input; {} for others."""
    call = call_of(node, GATED_LINEAR) or {}
    return call if call.pop("x", None) is x and x not in call.values() else {}


ASYNC_TENSOR_PARALLEL = Pass(
    name="async_tensor_parallel",
    find=find,
    does="Fuse every such pair.",
    # This runs after linears have become a device's own ops, so a pair that is put back keeps those.
    after=("lift_collectives", "sequence_parallel", "merge_linears", "lift_linear", "fuse_gated_linear"),
    guards=Guards(world_size=(2, None)),
    params=MappingProxyType(
        {"least_bytes_of_2": 0, "least_bytes_of_4": 0, "least_bytes_of_8": 0, "least_bytes_of_16": 0}
    ),
    traits=PassTraits(reads_content=False),
)
