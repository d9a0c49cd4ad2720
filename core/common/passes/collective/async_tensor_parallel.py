"""Fuse all-gathers with the linear layer after them, and linear layers with the reduce-scatter after them.

A kernel of `core::all_gather_linear` or `core::linear_reduce_scatter` may exchange one part of the tokens while it
computes another: asynchronous tensor parallelism. The collectives are those that `sequence_parallel` leaves, or that a
model asks for. Where a device brings neither op, both become again what they were.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import fx

from core.common.ops.canonical import ALL_GATHER, ALL_GATHER_LINEAR, LINEAR, LINEAR_REDUCE_SCATTER, REDUCE_SCATTER
from core.common.passes import Guards, NearMiss, Pass, PassContext, PassResult, PassTraits, Site, fuse, near_miss, view
from core.common.passes.collective.limits import call_of, refused_bytes, refused_group


class _Search:
    """One walk over a graph. taken: linears that belong to a site already."""

    def __init__(self) -> None:
        self.taken: set[fx.Node] = set()

    def find(self, context: PassContext, node: fx.Node) -> Site | NearMiss | None:
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
        return self._gather(node, given) if gathered else self._scatter(node, given)

    def _gather(self, node: fx.Node, given: dict[str, Any]) -> Site | NearMiss:
        """The first linear layer goes with the collective; others read the op's second result."""
        linear = next((user for user in node.users if _reads(user, node) and user not in self.taken), None)
        if linear is None:
            return near_miss(node, f"no linear layer reads {node}")
        self.taken.add(linear)
        _, weight, bias = _operands(linear)
        return Site(
            anchor=linear,
            target=ALL_GATHER_LINEAR.overload,
            args=(given["x"], weight, bias, given["group"], given["dim"], given["size"]),
            interior=(node, linear),
            outputs=(linear, node),
        )

    def _scatter(self, node: fx.Node, given: dict[str, Any]) -> Site | NearMiss:
        linear = given["x"]
        if not isinstance(linear, fx.Node) or not _is_linear(linear):
            return near_miss(node, f"{linear}, which is reduced, is no linear layer's")
        if linear in self.taken or view.only_user(linear) is not node:
            why = "belongs to an all-gather" if linear in self.taken else "is read by others too"
            return near_miss(node, f"{linear} {why}")
        self.taken.add(linear)
        return Site(
            anchor=node,
            target=LINEAR_REDUCE_SCATTER.overload,
            args=(*_operands(linear), given["group"], given["dim"]),
            interior=(linear, node),
        )


def _is_linear(node: fx.Node) -> bool:
    weight = _operands(node)[1]
    return (view.kind(node) == "linear" or node.target is LINEAR.overload) and len(view.shape(weight) or ()) == 2


def _reads(node: fx.Node, x: fx.Node) -> bool:
    """Tell whether a node is a linear layer of x, which reads it as nothing else."""
    first, weight, bias = _operands(node) if _is_linear(node) else (None, None, None)
    return first is x and x not in (weight, bias)


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    first = "x" if node.target is LINEAR.overload else "input"
    return view.operand(node, 0, first), view.operand(node, 1, "weight"), view.operand(node, 2, "bias")


def run(context: PassContext) -> PassResult:
    """Fuse every such pair."""
    return fuse(context, _Search().find)


ASYNC_TENSOR_PARALLEL = Pass(
    name="async_tensor_parallel",
    run=run,
    # After the linears have become a device's own, so that a pair that is put back has these.
    after=("lift_collectives", "sequence_parallel", "merge_linears", "lift_linear", "fuse_gated_linear"),
    guards=Guards(world_size=(2, None)),
    params=MappingProxyType(
        {"least_bytes_of_2": 0, "least_bytes_of_4": 0, "least_bytes_of_8": 0, "least_bytes_of_16": 0}
    ),
    traits=PassTraits(reads_content=False),
)
