"""The edits of planted mistakes: an argument changed, two swapped, a write lost, a value confused with another.

core/verify/planted.py makes its list of mistakes of these.
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
from core.common.ops.declaration import CanonicalOp, find_op
from core.common.passes import value_of, view
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.effects import written_args
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.sites import MADE_BY, site_name
from core.compilation.rewrite.mechanisms import apply_pass

NO_CHANGE = object()
"""Returned by a change that leaves an argument as it is."""
Edit = Callable[[fx.Node], bool]
"""Makes one node wrong; returns False where the node gives no room for that."""
Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A deliberately wrong variant of a pass."""

    name: str
    #: The pass that it replaces.
    of: str
    #: What is wrong, in a line.
    what: str
    make: Edit
    #: Offer every node to `make`, for passes that leave no mark on what they made.
    any_node: bool = False


def with_mistake(declared: Pass, mistake: Mistake) -> Pass:
    """Return the pass with the mistake in it, under the same name and with the same place in the order.

    If no node offers a place for the mistake, the last near-miss says so.
    """

    def run(context: PassContext) -> PassResult:
        result = apply_pass(declared, context)
        nodes = [node for node in context.graph.nodes if mistake.any_node or _made_by(node, context.name)]
        middle = len(nodes) // 2
        for node in [*nodes[middle:], *nodes[:middle]]:
            where = site_name(node)
            if mistake.make(node):
                return replace(result, matched=max(1, result.matched), sites=result.sites or (where,))
        reason = f"the planted mistake {mistake.name!r} found nowhere to be"
        return replace(result, near_misses=(*result.near_misses, NearMiss(site="", reason=reason)))

    owner = f"{declared.owner} with planted {mistake.name!r}"
    return replace(declared, find=None, run=run, mechanism="graph", patterns=(), expect=None, owner=owner)


def _made_by(node: fx.Node, name: str) -> bool:
    made = node.meta.get(MADE_BY)
    return made is not None and made.pass_name == name


def _edited(ops: str, edit: Callable[[Arguments], Arguments | None]) -> Edit:
    """Return an edit that changes arguments of calls of these canonical ops ("a|b"); `edit` returns None for no
    change."""

    def make(node: fx.Node) -> bool:
        declared = find_op(node.target) if node.op == "call_function" else None
        if declared is None or declared.name not in ops.split("|"):
            return False
        arguments = edit(dict(declared.bind(node.args, node.kwargs).args))
        if arguments is not None:
            _give(node, declared, arguments)
        return arguments is not None

    return make


def argument(ops: str, name: str, change: Callable[[Any], Any]) -> Edit:
    """Return an edit that changes one argument of calls of canonical ops; `change` returns `NO_CHANGE` to skip a
    call."""

    def edit(given: Arguments) -> Arguments | None:
        new = change(given[name]) if name in given else NO_CHANGE
        return None if new is NO_CHANGE or new == given[name] else {**given, name: new}

    return _edited(ops, edit)


def swapped(ops: str, first: str, second: str) -> Edit:
    """Return an edit that swaps two arguments of calls of canonical ops."""
    return _edited(
        ops,
        lambda given: None if given[first] is given[second] else {**given, first: given[second], second: given[first]},
    )


def _give(node: fx.Node, declared: CanonicalOp, arguments: Arguments) -> None:
    schema = declared.overload._schema.arguments
    node.args = tuple(arguments[each.name] for each in schema if not each.kwarg_only)
    node.kwargs = {each.name: arguments[each.name] for each in schema if each.kwarg_only}


def _copy_of(source: fx.Node, before: fx.Node, clone: Callable[..., Any]) -> fx.Node:
    """Insert a copy of what a node gives, with an example value of its own."""
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(clone, (source,))
    value = value_of(source)
    if value is not None:
        with torch.no_grad():
            set_value(copy, value.clone(), source)
    return copy


def times(factor: float) -> Callable[[Any], Any]:
    """Return a change that multiplies a number by a factor; 0 stays."""
    return lambda value: value * factor if value else NO_CHANGE


def dropped(value: Any) -> Any:
    """Leave an argument out."""
    return NO_CHANGE if value is None else None


def zero(value: Any) -> Any:
    """Replace a number by 0."""
    return 0.0 if value else NO_CHANGE


def negated(value: Any) -> Any:
    """Return the negative of a node's value."""
    return _changed(value, torch.neg)


def other_rows(value: Any) -> Any:
    """Return a node's rows in reverse: each row gets what is another's."""
    return _changed(value, torch.flipud)


def _changed(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if not isinstance(value, fx.Node):
        return NO_CHANGE
    with value.graph.inserting_after(value):
        changed = value.graph.call_function(function, (value,))
    changed.meta = {key: kept for key, kept in value.meta.items() if key != MADE_BY}
    return changed


OTHER_KIND: Mapping[str, str] = MappingProxyType(
    {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "silu", "relu2": "relu"}
)
"""For an activation, another one that is easily taken for it."""


def other_style(value: Any) -> Any:
    """Return the other style of rotation."""
    return "interleaved" if value == "half" else "half"


def first_operand_for_sum(node: fx.Node) -> bool:
    """Hand on the first operand of a fused add and norm in place of the sum, its last result: the residual is lost."""
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
    if declared is None:
        return False
    given = dict(declared.bind(node.args, node.kwargs).args)
    caches = [name for name in declared.mutates if isinstance(given[name], fx.Node)]
    _give(node, declared, given | {name: _copy_of(given[name], node, torch.clone) for name in caches})
    return bool(caches)


def write_into_copy(node: fx.Node) -> bool:
    """Let an in-place call write into a copy of an input, which nobody sees."""
    written = [each for each in written_args(node) if each.op == "placeholder"]
    if not written or node.op != "call_function":
        return False
    node.replace_input_with(written[0], _copy_of(written[0], node, torch.ops.aten.clone.default))
    return True


def swapped_slices(node: fx.Node) -> bool:
    """Exchange two slices of the same shape of a merged result."""
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
    """Replace `x + tiny` by x."""
    found = view.plus_number(node)
    if found is None or not 0 < abs(found[1]) < 1e-3:
        return False
    node.replace_all_uses_with(found[0])
    node.graph.erase_node(node)
    return True


def write_before_read(node: fx.Node) -> bool:
    """Move a write up to the first reader of its tensor, which then reads what was written."""
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
    """Replace a slice by another one of the same tensor, as if the numbers of the slice did not count."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not isinstance(value_of(node), torch.Tensor):
        return False
    for other in source.users:
        like = other.target is node.target and view.shape(other) == view.shape(node) and other is not node
        if like and repr(other.args[1]) != repr(node.args[1]) and node < other:
            other.replace_all_uses_with(node)
            return True
    return False
