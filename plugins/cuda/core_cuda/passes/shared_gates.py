"""Fuse the gate of a shared expert, its product and the sum with the routed experts to one launch.

Qwen2 MoE and Qwen3-Next multiply the shared expert by the sigmoid of a linear layer with one result: four launches.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.linear import LINEAR
from core.common.passes import NearMiss, Pass, PassContext, Site, find_op, near_miss, value_of, view
from core.common.passes.values.sizes import same_size
from core_cuda.ops.moe.shared_gate import add_gated_expert, why_not
from core_cuda.passes.examples.mixture import gated_experts
from core_cuda.passes.taking import given


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the sum of routed experts and a shared one behind its gate."""
    for routed, gated in view.orders(node) if view.kind(node) == "add" else ():
        for gate, shared in view.orders(gated) if view.kind(gated) == "mul" else ():
            linear: Any = gate.args[0] if view.kind(gate) == "sigmoid" else None
            if isinstance(linear, fx.Node) and find_op(linear.target) is LINEAR:
                return _site(node, routed, gated, gate, shared, linear)
    return None


def _site(
    node: fx.Node, routed: Any, gated: fx.Node, gate: fx.Node, shared: Any, linear: fx.Node
) -> Site | NearMiss | None:
    call = given(linear)
    shapes = [view.shape(each) for each in (routed, shared, call["x"], call["weight"])]
    if any(shape is None or len(shape) != 2 for shape in shapes) or not view.same_shape(routed, shared):
        return None
    if not same_size(shapes[0][0], shapes[2][0]):  # type: ignore[index]  # no shape is None here
        return near_miss(node, f"{linear} has other rows than {shared}")
    if shapes[3][0] != 1 or call["bias"] is not None:  # type: ignore[index]  # no shape is None here
        return near_miss(node, f"{linear} gives more than one number to a token, or has a bias")
    for each, after in ((linear, gate), (gate, gated), (gated, node)):
        if list(each.users) != [after]:
            return near_miss(node, f"{each} is used otherwise than in {after}")
    operands = (call["x"], call["weight"], shared, routed)
    if reason := why_not(*map(value_of, operands)):
        return near_miss(node, reason)
    return Site(anchor=node, target=add_gated_expert, args=operands, interior=(linear, gate, gated, node))


FUSE_SHARED_GATE = Pass(
    name="fuse_shared_gate",
    does="Fuse the gate of every shared expert, its product and the sum with the routed experts.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", "merge_linears", "lift_linear", "fuse_add_rms_norm"),
    examples=gated_experts,
)
