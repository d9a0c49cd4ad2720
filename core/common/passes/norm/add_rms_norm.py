"""Fuse a residual add with the RMSNorm of its sum to `core::add_rms_norm`; runs after `lift_rms_norm`."""

from __future__ import annotations

import operator

from torch import fx

from core.common.ops.norm import ADD_RMS_NORM, RMS_NORM
from core.common.passes import NearMiss, Pass, PassContext, Site, at_least_fp32, near_miss, view

_IN_PLACE = (operator.iadd, "add_", "__iadd__")


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the add and the norm of its sum; the sum stays available as the op's second output."""
    if node.target is not RMS_NORM.overload:
        return None
    wide = node.args[0]
    # If a cast before the norm only widens the sum (or does nothing), the norm's own compute dtype replaces it.
    total, casts = view.without_exact_casts(wide)  # type: ignore[arg-type]  # a norm's input is a node
    if total.target in _IN_PLACE:
        return near_miss(node, f"{total} adds in place")
    operands = next(view.orders(total), None)
    if view.kind(total) != "add" or (operands is not None and any(map(view.is_number, operands))):
        return None
    if operands is None:
        return near_miss(node, f"{total} scales one of its operands")
    if not view.same_shape(*operands):
        return near_miss(node, f"{total} adds operands of different shapes")
    if total in context.taken:
        return near_miss(node, f"{total} is normalised by an earlier norm, which gives it")
    context.taken.add(total)
    return Site(
        anchor=node,
        target=ADD_RMS_NORM.overload,
        args=(*operands, *node.args[1:]),
        kwargs={**node.kwargs, "compute_dtype": _compute_dtype(node)},
        interior=(total, *_inner(casts, node), node),
        outputs=(node, total),
    )


def _compute_dtype(norm: fx.Node) -> object:
    """Return the dtype of the statistics. Its default follows from the dtype of the op's input, which is the sum."""
    given, dtype = norm.kwargs.get("compute_dtype"), view.dtype(norm.args[0])
    return given if given is not None or dtype is None else at_least_fp32(dtype)


def _inner(casts: tuple[fx.Node, ...], norm: fx.Node) -> list[fx.Node]:
    """Return the casts that the op replaces. A cast used elsewhere stays and reads the op's second output."""
    inner: list[fx.Node] = []
    for cast in casts:
        if any(user is not norm and user not in inner for user in cast.users):
            break
        inner.append(cast)
    return inner


FUSE_ADD_RMS_NORM = Pass(
    name="fuse_add_rms_norm", find=find, does="Fuse every RMSNorm of a sum.", after=("lift_rms_norm", "lift_rotary")
)
"""The fusion of residual adds; `lift_rms_norm` comes first."""
