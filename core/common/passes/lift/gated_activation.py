"""Lift the gate of gated MLPs, `act(gate) * up`, to `core::gated_activation` or its form over one tensor."""

from __future__ import annotations

from torch import fx

from core.common.ops.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.rewrite import Site, fuse, near_miss


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the product of an activation and a tensor of the same shape."""
    if view.kind(node) != "mul":
        return None
    for gated, up in view.orders(node):
        kind = activation(gated)
        if kind is not None and isinstance(up, fx.Node):
            return _site(node, gated, up, kind)
    return None


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def activation(node: object) -> str | None:
    """Return the op's name of an activation node (`silu`, `gelu`, `gelu_tanh`), or None."""
    if not isinstance(node, fx.Node) or view.operand(node, 1, "inplace", False) is True:
        return None
    kind = view.kind(node)
    if kind == "silu":
        return "silu"
    if kind == "gelu":
        return _GELU.get(str(node.kwargs.get("approximate", "none")))
    return None


def _site(node: fx.Node, gated: fx.Node, up: fx.Node, kind: str) -> Site | NearMiss:
    gate = gated.args[0]
    if not isinstance(gate, fx.Node) or view.shape(gate) is None or view.shape(gate) != view.shape(up):
        return near_miss(node, f"{gated} and {up} differ in shape")
    if view.only_user(gated) is None:
        return near_miss(node, f"the activation {gated} is used a second time")
    halves = _halves(gate, up)
    if halves is None:
        return Site(
            anchor=node,
            target=GATED_ACTIVATION.overload,
            args=(gate, up),
            kwargs={"kind": kind},
            interior=(gated, node),
        )
    whole, gate_first = halves
    return Site(
        anchor=node,
        target=GATED_ACTIVATION_FUSED.overload,
        args=(whole,),
        kwargs={"kind": kind, "gate_first": gate_first},
        interior=(gate, up, gated, node),
    )


def _halves(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, bool] | None:
    """Return (tensor, gate comes first) if gate and up are the two halves of its last dimension."""
    if view.kind(gate) != "getitem" or view.kind(up) != "getitem" or gate.args[0] is not up.args[0]:
        return None
    parts, places = gate.args[0], (gate.args[1], up.args[1])
    if view.kind(parts) != "chunk" or not isinstance(parts, fx.Node) or places not in ((0, 1), (1, 0)):
        return None
    whole = parts.args[0]
    rank = len(view.shape(whole) or ())
    by_two = view.operand(parts, 1, "chunks") == 2 and view.operand(parts, 2, "dim", 0) in (-1, rank - 1)
    return (whole, places == (0, 1)) if by_two and isinstance(whole, fx.Node) else None


def run(context: PassContext) -> PassResult:
    """Lift every gated activation."""
    return fuse(context, find)


LIFT_GATED_ACTIVATION = Pass(name="lift_gated_activation", run=run)
