"""Attention sinks: one more logit per head in the softmax's denominator, as a column or as a gate on the result."""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.passes import same_sizes, view
from core.common.passes.attention.operands import Operand, Reach


def per_head(node: fx.Node, heads: Any, reach: Reach) -> Operand | None:
    """Return the tensor (H,) that the node broadcasts over its other dimensions; None if the node's values differ by
    token."""
    found = Operand(node)
    while view.kind(found.node) in ("expand", "reshape", "view", "unsqueeze", "cast") and reach(found.node):
        found = found.behind(found.node.args[0], found.node)
        sizes = view.shape(found.node)
        if sizes is not None and same_sizes(sizes, (heads,)):
            return found
    return None


def gate_of(product: fx.Node, scores: fx.Node, heads: Any, reach: Reach) -> tuple[fx.Node, Operand] | None:
    """Return (result, sinks) where attention's result is multiplied by `sigmoid(logsumexp(scores) - sinks)`.

    That factor is `Z / (Z + exp(sink))` with Z the softmax's denominator: it adds the sinks after the softmax.
    """
    result = view.only_user(product)
    gate: Any = view.other(result, product) if result is not None and view.kind(result) == "mul" else None
    nodes: list[fx.Node] = []
    while view.kind(gate) in ("cast", "unsqueeze", "sigmoid"):
        nodes.append(gate)
        gate = gate.args[0]
    if view.kind(gate) != "sub" or [view.kind(node) for node in nodes].count("sigmoid") != 1 or result is None:
        return None
    total, sinks = gate.args[:2]
    behind = view.source_of_cast(total)
    summed = behind if behind is not None else total
    known = isinstance(sinks, fx.Node) and view.kind(summed) == "logsumexp" and summed.args[0] is scores
    if not known or view.operand(summed, 1, "dim") not in (-1, (-1,), [-1]) or len(gate.args) != 2 or gate.kwargs:
        return None
    found = per_head(sinks, heads, reach)
    if found is None or not view.same_shape(result, product):
        return None
    nodes += [gate, summed, *([total] if summed is not total else [])]
    return result, found.behind(found.node, *nodes)
