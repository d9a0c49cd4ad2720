"""Fuse a residual add with the RMSNorm of its sum to `core::add_rms_norm`; runs after `lift_rms_norm`."""

from __future__ import annotations

from torch import fx

from core.common.ops.normalization import ADD_RMS_NORM, RMS_NORM
from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.rewrite import Site, fuse, near_miss


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the add and the norm of its sum; the sum stays available as the op's second output."""
    if node.target is not RMS_NORM.overload:
        return None
    total = node.args[0]
    if view.kind(total) != "add" or not isinstance(total, fx.Node):
        return None
    operands = next(view.orders(total), None)
    if operands is None:
        return near_miss(node, f"{total} scales one of its operands")
    x, residual = operands
    if view.shape(x) is None or view.shape(x) != view.shape(residual):
        return near_miss(node, f"{total} adds operands of different shapes")
    return Site(
        anchor=node,
        target=ADD_RMS_NORM.overload,
        args=(x, residual, *node.args[1:]),
        kwargs=node.kwargs,
        interior=(total, node),
        outputs=(node, total),
    )


def run(context: PassContext) -> PassResult:
    """Fuse every RMSNorm of a sum."""
    return fuse(context, find)


FUSE_ADD_RMS_NORM = Pass(name="fuse_add_rms_norm", run=run, after=("lift_rms_norm",))
