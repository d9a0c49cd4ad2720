"""Reading calls of canonical ops from a graph: what they are given, and who reads their results."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from core.common.ops.declaration import CanonicalOp, find_op


def arguments(node: fx.Node, op: CanonicalOp) -> dict[str, Any]:
    """Return by name the arguments of an op's call that are not the schema's defaults."""
    bound = op.bind(node.args, node.kwargs).args
    defaults = {a.name: a.default_value for a in op.overload._schema.arguments if a.has_default_value()}
    # By repr, so that False is not 0 and a node is compared with nothing.
    return {k: v for k, v in bound.items() if k not in defaults or repr(v) != repr(defaults[k])}


def outputs(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Return the node of each result of an op's call, None where nothing reads it: what `Site.outputs` wants."""
    op = find_op(node.target)
    count = 1 if op is None else len(op.overload._schema.returns)
    found = results(node)
    return (node,) if count == 1 else tuple(found.get(index) for index in range(count))


def results(node: fx.Node) -> dict[int, fx.Node]:
    """Return the node that reads each result of an op with several, the first one where there are more."""
    found: dict[int, fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem and len(user.args) == 2 and isinstance(user.args[1], int):
            found.setdefault(user.args[1], user)
    return found
