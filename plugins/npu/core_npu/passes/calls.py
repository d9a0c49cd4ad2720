"""Reading calls of torch_npu's ops from a graph, by name: torch_npu itself need not be there.

Dynamo writes what a model called, `torch.ops.npu.npu_rms_norm` (a packet of overloads) also for
`torch_npu.npu_rms_norm`, and a graph of ATen ops has the overload. Both read alike here; other overloads than the
default one are other ops.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from core.common.passes import view

__all__ = ["INT8", "called", "op", "other_reader", "read", "result_of", "results"]

_NAMESPACE = "npu"
INT8 = (None, torch.int8, torch.qint8, 1, 12)
"""How ops are asked for int8 codes: by nothing, by dtype, or by torch's number of the dtype; qint8 gives int8 too."""


def op(name: str) -> OpOverload[..., Any]:
    """Return the default overload of an op of torch_npu; AttributeError where nobody has registered it."""
    found: OpOverload[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def called(node: Any) -> str:
    """Return the name of the op of torch_npu that a node calls, "" for any other node."""
    target = node.target if isinstance(node, fx.Node) else None
    if isinstance(target, OpOverload) and target._overloadname == "default":
        name = str(target._schema.name)
    elif isinstance(target, OpOverloadPacket):
        name = str(target._qualified_op_name)
    else:
        return ""
    namespace, _, name = name.partition("::")
    return name if namespace == _NAMESPACE else ""


def read(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments of a call of torch_npu's op by name, defaults of its schema filled in."""
    arguments = op(called(node))._schema.arguments
    values = {a.name: a.default_value for a in arguments if a.has_default_value()}
    values.update(zip((a.name for a in arguments), node.args, strict=False))
    return values | node.kwargs


def result_of(node: Any, *names: str, index: int = 0) -> fx.Node | None:
    """Return the call of one of these ops whose result of that index a node is, or None."""
    if view.kind(node) != "getitem" or node.args[1] != index:
        return None
    return node.args[0] if called(node.args[0]) in names else None


def results(call: fx.Node) -> dict[int, tuple[fx.Node, ...]] | None:
    """Return the nodes that read each result of a call with several; None where it is used in another way."""
    found: dict[int, tuple[fx.Node, ...]] = {}
    for user in call.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return None
        found[user.args[1]] = (*found.get(user.args[1], ()), user)
    return found


def other_reader(node: fx.Node, reader: fx.Node) -> str:
    """Return the other readers of a value, as a reason, or ""."""
    others = [user for user in node.users if user is not reader]
    return f"{others[0]} reads {node} too" if others else ""
