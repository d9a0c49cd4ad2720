"""Mistakes planted into the in-tree passes on purpose: what `verify` and `core bisect` are tested by, and shown with.

A planted pass runs the real one and then spoils a single site of what it did, the middle one where there are several:
the tools have to name the pass and that site. Such mistakes were made in real rewrites, or nearly.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import core.common.ops.canonical  # noqa: F401  # declares the ops that mistakes name
from core.common.ops.declaration import find_op
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.effects import written_args
from core.common.passes.mechanisms import apply_pass
from core.common.passes.sites import MADE_BY, site_name
from core.common.passes.standard import COMMON_PASSES
from core.errors import UsageError

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


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda value: value * factor if value else NO_CHANGE


def _dropped(value: Any) -> Any:
    return NO_CHANGE if value is None else None


def _zero(value: Any) -> Any:
    return 0.0 if value else NO_CHANGE


def _negated(value: Any) -> Any:
    """Return the negative of a node's value."""
    if not isinstance(value, fx.Node):
        return NO_CHANGE
    with value.graph.inserting_after(value):
        negative = value.graph.call_function(torch.neg, (value,))
    negative.meta = {key: kept for key, kept in value.meta.items() if key != MADE_BY}
    return negative


_OTHER_KIND = {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "silu"}


def _other_style(value: Any) -> Any:
    return "interleaved" if value == "half" else "half"


def _first_operand_for_sum(node: fx.Node) -> bool:
    """Give readers of the sum of a fused add and norm its first operand alone: the residual is lost."""
    source = node.args[0] if node.target is operator.getitem else None
    declared = find_op(source.target) if isinstance(source, fx.Node) else None
    if declared is None or declared.name != "add_rms_norm" or node.args[1] != 1 or not node.users:
        return False
    assert isinstance(source, fx.Node)
    node.replace_all_uses_with(source.args[0])  # type: ignore[arg-type]  # the op's first operand is a node
    return True


def _lost_write(node: fx.Node) -> bool:
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
                copy.meta["example_value"] = value.clone()
        bound[name] = copy
    _bind(node, bound)
    return bool(caches)


def _swapped_slices(node: fx.Node) -> bool:
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


def _tiny_addend(node: fx.Node) -> bool:
    """Take `x + tiny` for x."""
    found = view.plus_number(node)
    if found is None or not 0 < abs(found[1]) < 1e-3:
        return False
    node.replace_all_uses_with(found[0])
    node.graph.erase_node(node)
    return True


def _write_before_read(node: fx.Node) -> bool:
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


def _alike_but_literals(node: fx.Node) -> bool:
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


def _mistake(name: str, of: str, what: str, spoil: Spoil, *, made: bool = True) -> Mistake:
    return Mistake(name=name, of=of, what=what, spoil=spoil, made=made)


_NARROW = torch.bfloat16

MISTAKES: tuple[Mistake, ...] = (
    _mistake("norm-eps", "lift_rms_norm", "eps ten times too large", argument("rms_norm", "eps", _times(10))),
    _mistake("norm-offset", "lift_rms_norm", "`1 + weight` read as `weight`", argument("rms_norm", "offset", _zero)),
    _mistake("norm-weight", "lift_rms_norm", "the weight is left out", argument("rms_norm", "weight", _dropped)),
    _mistake(
        "norm-precision",
        "lift_rms_norm",
        "statistics in bfloat16",
        argument("rms_norm", "compute_dtype", lambda value: _NARROW),
    ),
    _mistake(
        "add-norm-eps", "fuse_add_rms_norm", "eps ten times too large", argument("add_rms_norm", "eps", _times(10))
    ),
    _mistake(
        "add-norm-residual", "fuse_add_rms_norm", "the sum handed on is only its first operand", _first_operand_for_sum
    ),
    _mistake(
        "gate-kind",
        "lift_gated_activation",
        "another activation, such as the tanh form of GELU for the exact one",
        argument("gated_activation|gated_activation_fused", "kind", lambda kind: _OTHER_KIND.get(kind, NO_CHANGE)),
    ),
    _mistake("gate-swapped", "lift_gated_activation", "gate and up swapped", swapped("gated_activation", "gate", "up")),
    _mistake(
        "gate-half",
        "lift_gated_activation",
        "the wrong half is the gate",
        argument("gated_activation_fused", "gate_first", operator.not_),
    ),
    _mistake("rotary-swapped", "lift_rotary", "cos and sin swapped", swapped("rotary|rotary_single", "cos", "sin")),
    _mistake("rotary-sign", "lift_rotary", "the sign of sin", argument("rotary|rotary_single", "sin", _negated)),
    _mistake(
        "rotary-style",
        "lift_rotary",
        "pairs of neighbours for pairs of halves",
        argument("rotary|rotary_single", "style", _other_style),
    ),
    _mistake(
        "qk-norm-eps", "fuse_qk_norm_rotary", "eps ten times too large", argument("qk_norm_rotary", "eps", _times(10))
    ),
    _mistake(
        "qk-norm-weights",
        "fuse_qk_norm_rotary",
        "the weights of query and key swapped",
        swapped("qk_norm_rotary", "query_weight", "key_weight"),
    ),
    _mistake("layer-norm-eps", "lift_layer_norm", "eps ten times too large", argument("layer_norm", "eps", _times(10))),
    _mistake("layer-norm-bias", "lift_layer_norm", "the bias is left out", argument("layer_norm", "bias", _dropped)),
    _mistake(
        "attention-scale",
        "lift_attention",
        "the scale squared",
        argument("dense_attention", "scale", lambda s: s * s),
    ),
    _mistake(
        "attention-mask",
        "lift_attention",
        "the mask is left out",
        argument("dense_attention", "mask", _dropped),
    ),
    _mistake(
        "attention-causal",
        "lift_attention",
        "causal where the mask says all, or the reverse",
        argument("dense_attention", "causal", operator.not_),
    ),
    _mistake("cache-write", "fuse_attention_cache", "keys and values written into a copy of the cache", _lost_write),
    _mistake(
        "cache-swapped",
        "fuse_attention_cache",
        "keys written where values belong, and the reverse",
        swapped("dense_attention", "key_cache", "value_cache"),
    ),
    _mistake(
        "route-weights",
        "lift_moe_route",
        "weights renormalised where they are not, or the reverse",
        argument("moe_route", "renormalize", operator.not_),
    ),
    _mistake(
        "route-scale", "lift_moe_route", "weights ten times too large", argument("moe_route", "scale", _times(10))
    ),
    _mistake(
        "experts-kind",
        "lift_grouped_mlp",
        "another activation",
        argument("grouped_mlp", "kind", lambda kind: _OTHER_KIND.get(kind, NO_CHANGE)),
    ),
    _mistake("merged-slices", "merge_linears", "two results of a merged linear swapped", _swapped_slices),
    _mistake(
        "gate-up-half",
        "fuse_gate_up",
        "the wrong half is the gate",
        argument("gated_activation_fused", "gate_first", operator.not_),
    ),
    _mistake(
        "rotary-attention-tables",
        "fuse_rotary_attention",
        "cos and sin swapped",
        swapped("rotary_attention", "cos", "sin"),
    ),
    _mistake(
        "rotary-attention-weights",
        "fuse_rotary_attention",
        "the weights of query and key swapped",
        swapped("rotary_attention", "query_weight", "key_weight"),
    ),
    _mistake(
        "rotary-table-layout",
        "lift_rotary_table",
        "angles of neighbours for angles of halves",
        argument("rotary_table", "layout", _other_style),
    ),
    _mistake("linear-bias", "lift_linear", "the bias is left out", argument("linear", "bias", _dropped)),
    _mistake(
        "gated-linear-half",
        "fuse_gated_linear",
        "the wrong half is the gate",
        argument("gated_linear", "gate_first", operator.not_),
    ),
    _mistake("no-op-eps", "remove_no_ops", "`x + eps` taken for x", _tiny_addend, made=False),
    _mistake(
        "cse-write",
        "eliminate_common_subexpressions",
        "a value from after a write taken for the one before it",
        _write_before_read,
        made=False,
    ),
    _mistake(
        "cse-slices",
        "eliminate_common_subexpressions",
        "two slices of one tensor taken for equal",
        _alike_but_literals,
        made=False,
    ),
)
"""All planted mistakes; tests/common/verification/test_planted.py owes each in-tree pass at least one."""


def mistakes() -> tuple[Mistake, ...]:
    """Return the mistakes of passes that this tree has."""
    names = {declared.name for declared in COMMON_PASSES}
    return tuple(mistake for mistake in MISTAKES if mistake.of in names)


def planted(name: str, passes: Sequence[Pass] = COMMON_PASSES) -> Pass:
    """Return the pass with the mistake of that name in it; raise `UsageError` listing all of them for other names."""
    known = {mistake.name: mistake for mistake in mistakes()}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        raise UsageError(
            f"planting {name!r}",
            found=f"the mistakes are: {', '.join(known)}",
            remedy=f"did you mean {close[0]!r}?"
            if close
            else "name one of these, or a pass of yours as module:attribute",
        )
    mistake = known[name]
    return spoiled(next(declared for declared in passes if declared.name == mistake.of), mistake)
