"""How planted mistakes spoil what a pass did: an argument changed, two swapped, a write lost, a value mistaken.

core/verify/planted.py lists the mistakes themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

import core.common.ops.canonical  # noqa: F401  # declares the ops that mistakes name
from core.common.node_meta import set_value
from core.common.ops.declaration import find_op
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.effects import written_args
from core.common.passes.sites import MADE_BY, site_name
from core.compilation.rewrite.mechanisms import apply_pass

NO_CHANGE = object()
Spoil = Callable[[fx.Node], bool]
"""Spoil one node that a pass made, or any node for passes that make none; False where there is nothing to spoil."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A deliberately wrong variant of a pass. of: the pass it is put in place of. what: what is wrong, in a line.

    spoil: see `Spoil`. made: whether only nodes that the pass made are offered to it.
    """

    name: str
    of: str
    what: str
    spoil: Spoil
    made: bool = True


def spoiled(declared: Pass, mistake: Mistake) -> Pass:
    """Return the pass with the mistake in it, under the same name and with the same place in the order.

    Where the mistake found nothing to spoil, the last near-miss says so.
    """

    def run(context: PassContext) -> PassResult:
        result = apply_pass(declared, context)
        nodes = [node for node in context.graph.nodes if not mistake.made or _made_by(node, context.name)]
        middle = len(nodes) // 2
        for node in [*nodes[middle:], *nodes[:middle]]:
            where = site_name(node)
            if mistake.spoil(node):
                return replace(result, matched=max(1, result.matched), sites=result.sites or (where,))
        reason = f"the planted mistake {mistake.name!r} found nothing to spoil"
        return replace(result, near_misses=(*result.near_misses, NearMiss(site="", reason=reason)))

    return replace(
        declared,
        run=run,
        mechanism="graph",
        patterns=(),
        expect=None,
        owner=f"{declared.owner} with planted {mistake.name!r}",
    )


def _made_by(node: fx.Node, name: str) -> bool:
    made = node.meta.get(MADE_BY)
    return made is not None and made.pass_name == name


def argument(op: str, name: str, change: Callable[[Any], Any]) -> Spoil:
    """Return what changes one argument of calls of a canonical op; change gives `NO_CHANGE` to leave a call alone."""

    def spoil(node: fx.Node) -> bool:
        declared = find_op(node.target) if node.op == "call_function" else None
        if declared is None or declared.name not in op.split("|"):
            return False
        bound = declared.bind(node.args, node.kwargs).args
        new = change(bound[name]) if name in bound else NO_CHANGE
        if new is NO_CHANGE or new == bound[name]:
            return False
        _bind(node, {**bound, name: new})
        return True

    return spoil


def swapped(op: str, first: str, second: str) -> Spoil:
    """Return what swaps two arguments of calls of a canonical op."""

    def spoil(node: fx.Node) -> bool:
        declared = find_op(node.target) if node.op == "call_function" else None
        if declared is None or declared.name not in op.split("|"):
            return False
        bound = dict(declared.bind(node.args, node.kwargs).args)
        if bound[first] is bound[second]:
            return False
        _bind(node, {**bound, first: bound[second], second: bound[first]})
        return True

    return spoil


def _bind(node: fx.Node, arguments: Mapping[str, Any]) -> None:
    declared = find_op(node.target)
    assert declared is not None
    schema = declared.overload._schema.arguments
    node.args = tuple(arguments[each.name] for each in schema if not each.kwarg_only)
    node.kwargs = {each.name: arguments[each.name] for each in schema if each.kwarg_only}


def times(factor: float) -> Callable[[Any], Any]:
    """Return what multiplies a number by a factor; 0 is left alone."""
    return lambda value: value * factor if value else NO_CHANGE


def dropped(value: Any) -> Any:
    """Leave an argument out."""
    return NO_CHANGE if value is None else None


def zero(value: Any) -> Any:
    """Take 0 for a number."""
    return 0.0 if value else NO_CHANGE


def negated(value: Any) -> Any:
    """Return the negative of a node's value."""
    if not isinstance(value, fx.Node):
        return NO_CHANGE
    with value.graph.inserting_after(value):
        negative = value.graph.call_function(torch.neg, (value,))
    negative.meta = {key: kept for key, kept in value.meta.items() if key != MADE_BY}
    return negative


OTHER_KIND: Mapping[str, str] = MappingProxyType(
    {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "silu"}
)
"""An activation -> one that is taken for it."""


def other_style(value: Any) -> Any:
    """Take one style of rotation for another."""
    return "interleaved" if value == "half" else "half"


def first_operand_for_sum(node: fx.Node) -> bool:
    """Give readers of the sum of a fused add and norm, its last result, the first operand: the residual is lost."""
    source = node.args[0] if node.target is operator.getitem else None
    declared = find_op(source.target) if isinstance(source, fx.Node) else None
    last = {"add_rms_norm": 1, "add_rms_norm_quantize": 2}.get(declared.name if declared is not None else "")
    if last is None or node.args[1] != last or not node.users:
        return False
    assert isinstance(source, fx.Node)
    node.replace_all_uses_with(source.args[0])  # type: ignore[arg-type]  # the op's first operand is a node
    return True


def lost_write(node: fx.Node) -> bool:
    """Let an op that writes a cache write into a copy of it."""
    declared = find_op(node.target) if node.op == "call_function" else None
    if declared is None or not declared.mutates:
        return False
    bound = dict(declared.bind(node.args, node.kwargs).args)
    caches = [name for name in declared.mutates if isinstance(bound[name], fx.Node)]
    for name in caches:
        with node.graph.inserting_before(node):
            copy = node.graph.call_function(torch.clone, (bound[name],))
        value = view.value(bound[name])
        if value is not None:
            with torch.no_grad():
                set_value(copy, value.clone(), bound[name])
        bound[name] = copy
    _bind(node, bound)
    return bool(caches)


def write_into_copy(node: fx.Node) -> bool:
    """Let an in-place call write into a copy of an input, which nobody sees."""
    written = [each for each in written_args(node) if each.op == "placeholder"]
    if not written or node.op != "call_function":
        return False
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (written[0],))
    value = view.value(written[0])
    if value is not None:
        with torch.no_grad():
            set_value(copy, value.clone(), written[0])
    node.replace_input_with(written[0], copy)
    return True


def swapped_slices(node: fx.Node) -> bool:
    """Take each of two like slices of a merged result for the other."""
    parts = node.args[0] if node.target is operator.getitem else None
    if not isinstance(parts, fx.Node) or MADE_BY not in parts.meta:
        return False
    for other in parts.users:
        same = view.shape(other) == view.shape(node) and other.target is node.target
        if other is not node and same and other.args != node.args:
            node.args, other.args = other.args, node.args
            return True
    return False


def tiny_addend(node: fx.Node) -> bool:
    """Take `x + tiny` for x."""
    found = view.plus_number(node)
    if found is None or not 0 < abs(found[1]) < 1e-3:
        return False
    node.replace_all_uses_with(found[0])
    node.graph.erase_node(node)
    return True


def write_before_read(node: fx.Node) -> bool:
    """Let what reads a tensor before a write read it after: the write moves up to the first reader."""
    written = [each for each in written_args(node) if each.op == "placeholder"]
    if not written or not node.op.startswith("call_m"):
        return False
    order = {each: position for position, each in enumerate(node.graph.nodes)}
    start = max(order[source] for source in node.all_input_nodes)
    readers = [user for user in written[0].users if start < order[user] < order[node]]
    if not readers:
        return False
    min(readers, key=order.__getitem__).prepend(node)
    return True


def alike_but_literals(node: fx.Node) -> bool:
    """Take two calls for equal that differ in a number, such as which slice they take."""
    if node.op != "call_function" or node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    if not isinstance(view.value(node), torch.Tensor):
        return False
    for other in node.args[0].users:
        like = other.target is node.target and view.shape(other) == view.shape(node) and other is not node
        if like and repr(other.args[1]) != repr(node.args[1]) and node < other:
            other.replace_all_uses_with(node)
            return True
    return False
