"""Remove what computes nothing: casts to the same dtype, `x * 1`, `contiguous()` of contiguous tensors, equal views.

Two kinds. A node whose value is its input's very memory, read the same way, is removed, whatever else happens to that
memory. A node that copies its input (`x * 1`, `clone`) is removed only if nobody can tell the copy from the original:
neither is written afterwards, the caller does not get both, and the caller does not get an input in place of its copy.
Values keep every bit, so `x + 0.0` stays: it turns -0.0 into 0.0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import (
    LIFTS,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    is_impure,
    near_miss,
    site_name,
    value_of,
    view,
)
from core.common.passes.cleanup.sharing import Sharing, name_of, same_metadata, same_place


def run(context: PassContext) -> PassResult:
    """Remove every node that gives its input again, and calls that only count the use of torch's interface."""
    sharing = Sharing(context)
    sites: list[str] = []
    misses: list[NearMiss] = []
    for node in list(context.graph.nodes):
        if not node.op.startswith("call_"):
            continue
        if _is_log(node):
            sites.append(site_name(node))
            context.graph.erase_node(node)
            continue
        source = _source(node, sharing)
        if source is None:
            continue
        reason = _refusal(node, source, sharing)
        if reason:
            misses.append(near_miss(node, reason))
            continue
        sites.append(site_name(node))
        sharing.join(node, source)
        node.replace_all_uses_with(source)
        context.graph.erase_node(node)
    return PassResult(matched=len(sites), sites=tuple(sites), near_misses=tuple(misses))


def _is_log(node: fx.Node) -> bool:
    return node.target is torch._C._log_api_usage_once and not node.users


def _source(node: fx.Node, sharing: Sharing) -> fx.Node | None:
    """Return the input that the node returns unchanged, or None."""
    if not isinstance(value_of(node), Tensor):
        return None
    source = _copied(node) or _viewed(node, sharing)
    return source if source is not None and same_metadata(node, source) and _is_known(node) else None


def _viewed(node: fx.Node, sharing: Sharing) -> fx.Node | None:
    """Return the input that this node may be a full view of, or None."""
    source = node.args[0] if node.args else None
    new, old = value_of(node), value_of(source)
    if not isinstance(source, fx.Node) or not isinstance(old, Tensor) or new.dtype != old.dtype or new.ndim != old.ndim:
        return None
    return source if sharing.of(node) & sharing.of(source) else None


def _is_known(node: fx.Node) -> bool:
    """Tell whether the node calls torch's own code: the fake of another library's op may return its argument
    unchanged."""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).partition(".")[0] in ("aten", "prims") and not is_impure(node)
    return not isinstance(node.target, torch._ops.HigherOrderOperator) and not is_impure(node)


def _copied(node: fx.Node) -> fx.Node | None:
    """Return the input that the node copies bit by bit into memory of its own, or None."""
    kind = view.kind(node)
    if kind in ("mul", "add"):
        for source, number in view.orders(node):
            if isinstance(source, fx.Node) and _is_neutral(kind, number, value_of(source)):
                return source
    elif kind in ("sub", "div") and len(node.args) == 2 and not node.kwargs:
        first, number = node.args
        if isinstance(first, fx.Node) and _is_neutral(kind, number, value_of(first)):
            return first
    elif name_of(node) == "clone" or name_of(node).endswith("dropout"):  # active dropout is impure and not known here
        source = node.args[0] if node.args else None
        return source if isinstance(source, fx.Node) else None
    return None


def _is_neutral(kind: str, number: Any, value: Any) -> bool:
    if not view.is_number(number) or not isinstance(value, Tensor) or value.is_complex():
        return False  # infinity times 1 + 0i is NaN
    if kind in ("mul", "div"):
        return bool(number == 1)
    if number != 0 or not value.is_floating_point():
        return bool(number == 0)
    # -0.0 + 0.0 and -0.0 - (-0.0) are 0.0.
    negative = math.copysign(1.0, number) < 0
    return negative == (kind == "add")


def _refusal(node: fx.Node, source: fx.Node, sharing: Sharing) -> str:
    """Return why the node must stay, or "" where its source can stand in for it."""
    if not same_place(node, source):
        return "it begins at another element of its memory"
    own = sharing.of(node)
    if own & sharing.of(source):
        if own & sharing.reshaped:
            return "its shape is changed in place"
        if source.op in ("placeholder", "get_attr") and any(user.op == "output" for user in node.users):
            return f"it is returned, and {source.name} is an input"
        return ""
    return sharing.refusal(node, source, node)


REMOVE_NO_OPS = Pass(
    name="remove_no_ops",
    does="Remove every node that gives its input again, and calls that only count the use of torch's interface.",
    run=run,
    before=LIFTS,
)
