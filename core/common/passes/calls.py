"""Calls of canonical ops in a graph: what they are given, who reads their results, and the site of a new one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from core.common.ops.declaration import CanonicalOp, find_op
from core.common.passes.sites import Site
from core.common.passes.viewed import Viewed, viewed


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


def split(op: CanonicalOp, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by name as a call of the op takes them: by position, None for what is missing, and by name."""
    positional = [argument.name for argument in op.overload._schema.arguments if not argument.kwarg_only]
    named = {name: value for name, value in given.items() if name not in positional}
    return tuple(given.get(name) for name in positional), named


def site(
    op: CanonicalOp,
    given: Mapping[str, Any],
    interior: tuple[fx.Node, ...],
    outputs: tuple[fx.Node | Viewed | None, ...],
) -> Site | None:
    """Return the site of an op with arguments by name and these results; None where nothing reads any of them."""
    anchor = next((viewed(each).node for each in outputs if each is not None), None)
    if anchor is None:
        return None
    args, kwargs = split(op, given)
    return Site(anchor=anchor, target=op.overload, args=args, kwargs=kwargs, interior=interior, outputs=outputs)
