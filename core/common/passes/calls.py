"""Calls of canonical ops in a graph: their arguments, the readers of their results, and the site of a new call."""

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
    given = op.bind(node.args, node.kwargs).args
    defaults = {a.name: a.default_value for a in op.overload._schema.arguments if a.has_default_value()}
    # Compare by repr: False must differ from 0, and `==` on a node or tensor has no single answer.
    return {k: v for k, v in given.items() if k not in defaults or repr(v) != repr(defaults[k])}


def outputs(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Return the node of each result of an op's call, None for a result that nothing reads; in the form of
    `Site.outputs`."""
    op = find_op(node.target)
    count = 1 if op is None else len(op.overload._schema.returns)
    found = results(node)
    return (node,) if count == 1 else tuple(found.get(index) for index in range(count))


def results(node: fx.Node) -> dict[int, fx.Node]:
    """Return, for an op with several results, the first node that reads each."""
    found: dict[int, fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem and len(user.args) == 2 and isinstance(user.args[1], int):
            found.setdefault(user.args[1], user)
    return found


def split(op: CanonicalOp, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split arguments by name into those that the op takes by position (None for a missing one) and those it takes by
    name."""
    positional = [argument.name for argument in op.overload._schema.arguments if not argument.kwarg_only]
    named = {name: value for name, value in given.items() if name not in positional}
    return tuple(given.get(name) for name in positional), named


def site(
    op: CanonicalOp,
    given: Mapping[str, Any],
    interior: tuple[fx.Node, ...],
    outputs: tuple[fx.Node | Viewed | None, ...],
) -> Site | None:
    """Return the site of an op with these arguments and results; None if nothing reads any result."""
    anchor = next((viewed(each).node for each in outputs if each is not None), None)
    if anchor is None:
        return None
    args, kwargs = split(op, given)
    return Site(anchor=anchor, target=op.overload, args=args, kwargs=kwargs, interior=interior, outputs=outputs)
