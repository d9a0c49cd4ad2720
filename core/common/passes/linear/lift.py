"""Lift linear layers to `core::linear`, and with the gate of an MLP to `core::gated_linear`, for a device's own
kernels.

Both run only where the device brings the op, and take only weights that are constants of the graph: a kernel may then
read them before earlier work of the step is done. They run last, after linears are merged and gates read the merged
result whole.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.canonical import GATED_ACTIVATION_FUSED, GATED_LINEAR, LINEAR
from core.common.passes import Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss, view


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a linear layer with a constant weight; a near-miss if the weight is computed or written."""
    if view.kind(node) != "linear":
        return None
    x, weight, bias = linear_operands(node)
    reason = _refusal(context, x, weight, bias)
    if reason:
        return near_miss(node, reason)
    return Site(anchor=node, target=LINEAR.overload, args=(x, weight, bias), interior=(node,))


def find_gated(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a gated activation of both halves of a linear layer's result, which nothing else reads."""
    if node.target is not GATED_ACTIVATION_FUSED.overload:
        return None
    whole = node.args[0] if node.args else node.kwargs.get("gate_up")
    if not isinstance(whole, fx.Node) or (view.kind(whole) != "linear" and whole.target is not LINEAR.overload):
        return None
    if view.only_user(whole) is not node:
        others = ", ".join(user.name for user in whole.users if user is not node)
        return near_miss(node, f"{whole} is used by {others} too")
    operands = linear_operands(whole)
    reason = _refusal(context, *operands)
    if reason:
        return near_miss(node, reason)
    options = {name: value for name, value in node.kwargs.items() if name != "gate_up"}
    return Site(anchor=node, target=GATED_LINEAR.overload, args=operands, kwargs=options, interior=(whole, node))


def linear_operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return x, weight and bias of a linear in either spelling."""
    first = "x" if node.target is LINEAR.overload else "input"
    return view.operand(node, 0, first), view.operand(node, 1, "weight"), view.operand(node, 2, "bias")


def _refusal(context: PassContext, x: Any, weight: Any, bias: Any) -> str:
    """Return why the op can't compute a linear of these operands, or ""."""
    assert context.constants is not None  # the guard has seen to it
    for operand in (weight, bias):
        if operand is not None and context.constants.value(operand) is None:
            return f"{operand} is no constant that is bound to the graph"
        if operand is not None and context.analysis("writes").writers(operand):
            return f"{operand} is written by the graph"
    dtype, sizes = view.dtype(x), view.shape(weight)
    if dtype is None or not dtype.is_floating_point or sizes is None or len(sizes) != 2:
        return f"{x} is {dtype}, {weight} has shape {sizes}"
    for operand in (weight, bias):
        if operand is not None and view.dtype(operand) != dtype:
            return f"{x} is {dtype}, {operand} is {view.dtype(operand)}"
    return ""


LIFT_LINEAR = Pass(
    name="lift_linear",
    find=find,
    does="Make every linear layer of a bound weight the op that the device brings.",
    after=("merge_linears",),
    guards=Guards(constants=True, implements=frozenset({LINEAR.qualified_name})),
    traits=PassTraits(reads_content=False),
)
FUSE_GATED_LINEAR = Pass(
    name="fuse_gated_linear",
    find=find_gated,
    does="Fuse every linear layer with the gated activation of its result.",
    after=("lift_gated_activation", "fuse_gate_up", "lift_linear", "merge_linears"),
    guards=Guards(constants=True, implements=frozenset({GATED_LINEAR.qualified_name})),
    traits=PassTraits(reads_content=False),
)
