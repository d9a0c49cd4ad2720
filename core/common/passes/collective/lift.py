"""Lift functional collectives to canonical ops: all-reduces, reduce-scatters and all-gathers over the first dimension.

`torch.distributed` traces to pairs of `_c10d_functional.…` and `wait_tensor`, whoever asked for them: DTensor,
transformers' plans for tensor parallelism, or a model's own code. `torch.distributed.all_reduce(x)` writes its result
into x; where nobody else sees that memory, its readers are given the new op's result instead, and the write goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from core.common.ops.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, group_size
from core.common.passes import (
    CanonicalOp,
    Guards,
    NearMiss,
    Pass,
    PassContext,
    PassTraits,
    Site,
    near_miss,
    view,
)

_OPS: Mapping[str, tuple[CanonicalOp, tuple[str, ...]]] = MappingProxyType(
    {
        "_c10d_functional::all_reduce": (ALL_REDUCE, ("input", "reduce_op", "group_name")),
        "_c10d_functional::reduce_scatter_tensor": (
            REDUCE_SCATTER,
            ("input", "reduce_op", "group_size", "group_name"),
        ),
        "_c10d_functional::all_gather_into_tensor": (ALL_GATHER, ("input", "group_size", "group_name")),
    }
)
"""Name of a functional collective -> its canonical op, and the names of its own arguments."""
_OTHERS = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"})


def _name(node: fx.Node) -> str:
    """Return the name of the torch op that a node calls, without its overload."""
    target: Any = node.target
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target._schema.name) if isinstance(target, OpOverload) else ""


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a collective with its `wait_tensor`, and with the write of its result if there is one."""
    name = _name(node)
    if name not in _OPS:
        known = name.partition("::")[0] in _OTHERS and not name.endswith("::wait_tensor")
        return near_miss(node, f"{name} has no canonical op") if known else None
    op, names = _OPS[name]
    wait = view.only_user(node)
    if wait is None or _name(wait) != "_c10d_functional::wait_tensor":
        return near_miss(node, f"{node} is used otherwise than in one wait")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    # The group is given by its name, or with some versions of torch itself.
    group = getattr(given["group_name"], "group_name", given["group_name"])
    reason = _refusal(node, given, group)
    if reason:
        return near_miss(node, reason)
    x, written = given["input"], _written(wait, given["input"])
    return Site(
        anchor=written or wait,
        target=op.overload,
        args=(x, group),
        interior=(node, wait),
        overwritten=() if written is None else (x,),
    )


def _refusal(node: fx.Node, given: Mapping[str, Any], group: Any) -> str:
    if given.get("reduce_op", "sum") != "sum":
        return f"{node} reduces by {given['reduce_op']!r}, not by 'sum'"
    dtype = view.dtype(given["input"])
    if dtype is None or dtype.is_complex:
        return f"{given['input']} is {dtype}"
    if not isinstance(group, str):
        return f"its group {group!r} has no name"
    size = group_size(group)
    meant = given.get("group_size", size)
    return f"{node} is for {meant} processes, its group {group!r} has {size}" if meant != size else ""


def _written(wait: fx.Node, x: Any) -> fx.Node | None:
    """Return the node that copies the result of an all-reduce back into the tensor that was reduced, if that is its
    only use."""
    user = view.only_user(wait)
    if user is None or len(user.args) != 2 or user.args[0] is not x or user.args[1] is not wait:
        return None
    writes = user.target == "copy_" if user.op == "call_method" else user.target is torch.ops.aten.copy_.default
    return user if writes else None


LIFT_COLLECTIVES = Pass(
    name="lift_collectives",
    find=find,
    does="Lift every functional collective.",
    guards=Guards(world_size=(2, None)),
    traits=PassTraits(reads_content=False),
)
