"""Lowering canonical ops: each call becomes the device's implementation if its condition holds, else its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from core.common.ops.declaration import CanonicalOp, find_op
from core.common.ops.implementation import OpCall, OpImplementation
from core.errors import LoweringError

REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpChoice:
    """What one call of a canonical op became. node: its name in the graph. refused: implementation -> why not."""

    op: str
    node: str
    implementation: str
    refused: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


def lower_ops(graph: fx.GraphModule, implementations: Sequence[OpImplementation]) -> tuple[OpChoice, ...]:
    """Replace every canonical op in `graph`, in place; the first implementation whose condition holds wins."""
    choices = []
    for node in graph.graph.nodes:
        op = find_op(node.target) if node.op == "call_function" else None
        if op is not None:
            choices.append(_lower(node, op, [i for i in implementations if i.op == op.qualified_name]))
    graph.recompile()
    return tuple(choices)


def _lower(node: fx.Node, op: CanonicalOp, candidates: list[OpImplementation]) -> OpChoice:
    call = op.bind(*fx.map_arg((node.args, dict(node.kwargs)), _example))
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = _ask(candidate, call)
        if reason is None:
            node.target = candidate.fn
            return OpChoice(op=op.qualified_name, node=node.name, implementation=candidate.name, refused=tuple(refused))
        refused.append((candidate.name, reason))
    node.target = op.reference
    return OpChoice(op=op.qualified_name, node=node.name, implementation=REFERENCE, refused=tuple(refused))


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
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None or not isinstance(value, (torch.Tensor, torch.SymInt, int, float)):
        raise LoweringError(
            f"lowering a canonical op that takes node {node.name!r}",
            found="the node has no example value",
            remedy="a pass that adds nodes must set node.meta['example_value']",
        )
    return value
