"""Choosing implementations of canonical ops: the device's own where its condition holds.

A call that no implementation takes becomes again the nodes that a lift made it from; a call that was in the model from
the start becomes the op's reference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from core.common.node_meta import value_of
from core.common.ops.declaration import CanonicalOp, find_op
from core.common.ops.implementation import OpCall, OpImplementation
from core.common.passes.original import restore
from core.errors import LoweringError

BREAK_POINT = "break_point"
"""Key of a node's meta: the op that it is to the user, where piecewise capture cuts the graph."""
REFERENCE = "reference"
EAGER = "eager reference"
ORIGINAL_NODES = "original"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpChoice:
    """What one call of a canonical op became."""

    op: str
    #: The call's name in the graph.
    node: str
    #: Its name; or "original" for the nodes that a lift replaced, "reference" for the op's own code, "eager reference"
    #: for the op's form between graphs.
    implementation: str
    #: Implementations that refused the call, each with the reason.
    refused: tuple[tuple[str, str], ...] = ()


def choose_implementations(
    graph: fx.GraphModule, implementations: Sequence[OpImplementation], *, mark: Collection[str] = ()
) -> tuple[OpChoice, ...]:
    """Replace every canonical op in `graph`, in place; the first implementation whose condition holds wins.

    mark: qualified names of ops whose nodes get `meta["break_point"]`: what they become stays one node.
    """
    choices = []
    pending = list(reversed(graph.graph.nodes))
    while pending:
        node = pending.pop()
        op = find_op(node.target) if node.op == "call_function" else None
        if op is not None:
            choice, restored = _choose(node, op, [i for i in implementations if i.op == op.qualified_name])
            if op.qualified_name in mark and not restored:
                node.meta[BREAK_POINT] = op.qualified_name
                if choice.implementation == REFERENCE and op.eager is not None:
                    node.target, choice = op.eager, replace(choice, implementation=EAGER)
            choices.append(choice)
            pending += reversed(restored)  # a fused op may have been made from other canonical ops
    graph.recompile()
    return tuple(choices)


def put_back_unimplemented(graph: fx.GraphModule, implementations: Sequence[OpImplementation]) -> int:
    """Put back what lifts replaced by ops that no implementation is for; return how many calls were put back.

    A pass of a later stage then finds these nodes as the model wrote them.
    """
    known = {implementation.op for implementation in implementations}
    pending, count = list(graph.graph.nodes), 0
    while pending:
        node = pending.pop()
        op = find_op(node.target) if node.op == "call_function" else None
        restored = restore(node) if op is not None and op.qualified_name not in known else None
        if restored is not None:
            pending += restored
            count += 1
    graph.recompile()
    return count


def _choose(node: fx.Node, op: CanonicalOp, candidates: list[OpImplementation]) -> tuple[OpChoice, list[fx.Node]]:
    """Choose for one call; return what it became, and the original nodes if it became these."""
    call = op.bind(*fx.map_arg((node.args, dict(node.kwargs)), _example))
    refused: list[tuple[str, str]] = []
    chosen, restored = "", None
    for candidate in candidates:
        reason = _ask(candidate, call)
        if reason is None:
            node.target, chosen = candidate.fn, candidate.name
            break
        refused.append((candidate.name, reason))
    else:
        restored = restore(node)
        chosen = REFERENCE if restored is None else ORIGINAL_NODES
        if restored is None:
            node.target = op.reference
    choice = OpChoice(op=op.qualified_name, node=node.name, implementation=chosen, refused=tuple(refused))
    return choice, restored or []


def _ask(candidate: OpImplementation, call: OpCall) -> str | None:
    try:
        return candidate.condition(call)
    except Exception as error:
        raise LoweringError(
            f"asking implementation {candidate.name!r} whether it takes {candidate.op}",
            found=f"its condition raised {type(error).__name__}: {error}",
            remedy="mend the condition: it must return None or a reason",
        ) from error


def _example(node: fx.Node) -> Any:
    value = value_of(node)
    if value is None or not isinstance(value, (torch.Tensor, torch.SymInt, int, float)):
        raise LoweringError(
            f"choosing an implementation for what takes node {node.name!r}",
            found="the node has no example value",
            remedy="a pass that adds nodes must set node.meta['example_value']",
        )
    return value
