"""Choosing implementations of canonical ops: the device's own where its condition holds.

A call that no implementation takes becomes again the nodes that a lift made it from; a call that was in the model from
the start becomes the op's reference. Where several take a call, measuring.py chooses anew for each bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import fx

from core.common.node_meta import value_of
from core.common.ops.declaration import CanonicalOp, find_op
from core.common.ops.implementation import Condition, OpCall, OpImplementation
from core.common.passes.constants import Constants
from core.common.passes.original import restore
from core.common.passes.writes import find_writes
from core.errors import LoweringError

BREAK_POINT = "break_point"
"""Key of a node's meta: the op's name for users, at a node where piecewise capture cuts the graph."""
REFERENCE = "reference"
EAGER = "eager reference"
ORIGINAL_NODES = "original"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpChoice:
    """The implementation that one call of a canonical op got."""

    op: str
    #: The call's name in the graph.
    node: str
    #: The implementation's name; or "original" for the nodes that a lift replaced, "reference" for the op's own code,
    #: "eager reference" for the op's form between graphs.
    implementation: str
    #: Implementations before it that refused the call, and those that can't be used here, each with the reason.
    refused: tuple[tuple[str, str], ...] = ()
    #: Further implementations that take the call; none where the user named one.
    others: tuple[str, ...] = ()


def choose_implementations(
    graph: fx.GraphModule,
    implementations: Sequence[OpImplementation],
    *,
    mark: Collection[str] = (),
    providers: Mapping[str, str] = MappingProxyType({}),
    constants: Constants | None = None,
) -> tuple[OpChoice, ...]:
    """Replace every canonical op in `graph`, in place; the first implementation whose condition holds wins.

    mark: qualified names of ops whose nodes get `meta["break_point"]`: what they become stays one node. providers: the
    name of the implementation, or `REFERENCE`, that the user wants for an op; calls that it refuses go to the others.
    constants: what is bound to the graph, which conditions are told of.
    """
    choices = []
    fixed = _fixed(graph, constants)
    pending = list(reversed(graph.graph.nodes))
    while pending:
        node = pending.pop()
        op = find_op(node.target) if node.op == "call_function" else None
        if op is not None:
            candidates = [i for i in implementations if i.op == op.qualified_name]
            choice, restored = _choose(node, op, candidates, providers.get(op.qualified_name, ""), fixed)
            if op.qualified_name in mark and not restored:
                node.meta[BREAK_POINT] = op.qualified_name
                if choice.implementation == REFERENCE and op.eager is not None:
                    node.target, choice = op.eager, replace(choice, implementation=EAGER)
            choices.append(choice)
            pending += reversed(restored)  # a fused op may have been made from other canonical ops
    graph.recompile()
    return tuple(choices)


def _fixed(graph: fx.GraphModule, constants: Constants | None) -> frozenset[fx.Node]:
    """Return the placeholders of constants that nothing in the graph writes."""
    if constants is None:
        return frozenset()
    names, writes = constants.names, find_writes(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    return frozenset(node for node in placeholders if node.name in names and not writes.writers(node))


def implemented_ops(
    implementations: Sequence[OpImplementation], providers: Mapping[str, str] = MappingProxyType({})
) -> frozenset[str]:
    """Return the canonical ops that have an implementation whose library is here.

    providers: those that the user wants; what gives accuracy up, or runs on request, counts only where it is one of
    them.
    """
    return frozenset(
        each.op for each in implementations if not each.missing and _runs(each, providers.get(each.op, ""))
    )


def _runs(implementation: OpImplementation, wanted: str) -> bool:
    """Tell whether an implementation may run; wanted: the name that the user asked for, or ""."""
    unasked = implementation.slack <= 1 and not implementation.on_request
    return unasked or implementation.name == wanted


def put_back_unimplemented(graph: fx.GraphModule, known: Collection[str]) -> int:
    """Put back the original nodes of lifted calls of ops that are not known; return how many calls were put back.

    known: as `implemented_ops` gives them. Passes of later stages then see these nodes as the model wrote them.
    """
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


def _choose(
    node: fx.Node, op: CanonicalOp, candidates: list[OpImplementation], wanted: str, fixed: frozenset[fx.Node]
) -> tuple[OpChoice, list[fx.Node]]:
    """Choose for one call; return what it became, and the original nodes if it became these."""
    named = (*zip(op.positional, node.args, strict=False), *node.kwargs.items())
    constants = frozenset(name for name, value in named if isinstance(value, fx.Node) and value in fixed)
    call = replace(bound_call(node, op), constants=constants)
    candidates = [each for each in candidates if _runs(each, wanted)]
    refused: list[tuple[str, str]] = []
    taking: list[OpImplementation] = []
    for candidate in sorted(candidates, key=lambda each: each.name != wanted):  # stable
        if wanted and (taking or wanted == REFERENCE):
            break
        reason = candidate.missing or asked(candidate, "condition", call)
        if not reason:
            taking.append(candidate)
        elif candidate.missing or not taking:
            refused.append((candidate.name, reason))
    restored = None
    if taking:
        node.target, chosen = taking[0].fn, taking[0].name
    else:
        restored = restore(node)
        chosen = REFERENCE if restored is None else ORIGINAL_NODES
        if restored is None:
            node.target = op.reference
    others = tuple(each.name for each in taking[1:])
    choice = OpChoice(
        op=op.qualified_name, node=node.name, implementation=chosen, refused=tuple(refused), others=others
    )
    return choice, restored or []


def unmet(choices: Sequence[OpChoice], providers: Mapping[str, str]) -> list[str]:
    """Return what is to be told the user of calls that do not get the implementation that was asked for."""
    found: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        reason = dict(choice.refused).get(providers.get(choice.op, ""))
        if reason is not None:
            found.setdefault((choice.op, reason), []).append(choice.node)
    return [
        f"{len(nodes)} calls of {op} are not run by {providers[op]!r}, as asked ({nodes[0]}): {reason}"
        for (op, reason), nodes in found.items()
    ]


def bound_call(node: fx.Node, op: CanonicalOp) -> OpCall:
    """Return the call of an op that a node is, its arguments by name, tensors and sizes as the trace knows them.

    The node's target may have been replaced by an implementation, which takes the same arguments.
    """
    return op.bind(*fx.map_arg((node.args, dict(node.kwargs)), _example))


def asked(candidate: OpImplementation, name: Literal["condition", "timed"], call: OpCall) -> str | None:
    """Return what an implementation says about a call; raise `LoweringError` where it raises."""
    condition: Condition = getattr(candidate, name)
    try:
        return condition(call)
    except Exception as error:
        raise LoweringError(
            f"asking implementation {candidate.name!r} about a call of {candidate.op}",
            found=f"its {name!r} raised {type(error).__name__}: {error}",
            remedy=f"mend {name!r}: it must return None or a reason",
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
