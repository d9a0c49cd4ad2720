"""Let a gated activation read the merged result of gate and up whole: `core::gated_activation_fused`, no slices."""

from __future__ import annotations

from torch import fx

from core.common.ops.mlp import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.passes import NearMiss, Pass, PassContext, Site, near_miss, view
from core.common.passes.rotary.halves import halves


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a gated activation of the two halves of one tensor; None where gate and up come from different ones."""
    if node.target is not GATED_ACTIVATION.overload:
        return None
    gate, up = (view.operand(node, index, name) for index, name in enumerate(("gate", "up")))
    if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node):
        return None
    found = halves(gate, up)
    if found is None:
        parts = _parts(gate)
        if parts is None or parts is not _parts(up):
            return None
        return near_miss(node, f"{gate} and {up} are parts of {parts.args[0]}, but not its halves")
    able = context.implemented or frozenset()
    if GATED_ACTIVATION.qualified_name in able and GATED_ACTIVATION_FUSED.qualified_name not in able:
        return near_miss(
            node, "the device implements the activation of two tensors, and not the one of a merged result"
        )
    return Site(
        anchor=node,
        target=GATED_ACTIVATION_FUSED.overload,
        args=(found.whole,),
        kwargs={
            **{key: value for key, value in node.kwargs.items() if key not in ("gate", "up")},
            "gate_first": found.first,
            "interleaved": found.interleaved,
        },
        interior=(gate, up, node),
    )


def _parts(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node is a part of (of a split or chunk)."""
    parts = node.args[0] if view.kind(node) == "getitem" else None
    return parts if isinstance(parts, fx.Node) and view.kind(parts) in ("split", "chunk") else None


FUSE_GATE_UP = Pass(
    name="fuse_gate_up",
    find=find,
    does="Fuse every gated activation of two halves.",
    after=("lift_gated_activation", "merge_linears", "merge_lora"),
)
