"""The analysis "writes": which storage each node's value lies in, and which nodes write into which storage."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from core.common.node_meta import value_of
from core.common.ops.declaration import find_op
from core.common.passes.effects import denies_writes, written_args
from core.common.passes.values.layouts import memory, tensors


@dataclass(frozen=True, slots=True)
class Writes:
    """Which storages each node's value lies in, and which nodes write into which storage, in graph order.

    A storage is a key; a view has the key of its base; holders are the nodes that lie in it. Where values are known
    their storages are compared, so the answer is exact; otherwise whatever can return a view is taken to return one.
    """

    storages: Mapping[fx.Node, frozenset[object]]
    written: Mapping[fx.Node, frozenset[object]]
    holders: Mapping[object, tuple[fx.Node, ...]]
    all_written: frozenset[object] = frozenset()

    def of(self, *nodes: fx.Node) -> frozenset[object]:
        """Return the storages in which the values of these nodes lie."""
        return _NONE.union(*(self.storages.get(node, _NONE) for node in nodes))

    def writers(self, *nodes: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that write into a storage of these nodes, through whatever view."""
        keys = self.of(*nodes) & self.all_written
        return tuple(writer for writer, into in self.written.items() if into & keys) if keys else ()


_NONE: frozenset[object] = frozenset()


def find_writes(module: fx.GraphModule) -> Writes:
    """Compute the storages and writes of a graph in one walk."""
    storages: dict[fx.Node, frozenset[object]] = {}
    written: dict[fx.Node, frozenset[object]] = {}
    for node in module.graph.nodes:
        into = () if _only_reads(node) else written_args(node)
        storages[node] = _storages(node, storages, into)
        keys = _NONE.union(*(storages[argument] for argument in into)) if into else _NONE
        if keys:
            written[node] = keys
    holders: dict[object, list[fx.Node]] = {}
    for node, lies_in in storages.items():
        for key in lies_in:
            holders.setdefault(key, []).append(node)
    all_written = _NONE.union(*written.values())
    return Writes(storages, written, {key: tuple(nodes) for key, nodes in holders.items()}, all_written)


def _only_reads(node: fx.Node) -> bool:
    """Tell quickly, for the calls that make up most of a graph, that they write into no argument."""
    if node.op == "call_function":
        return node.target in _READERS and "out" not in node.kwargs
    return not node.op.startswith("call_") or (node.op == "call_method" and node.target in _READING_METHODS)


_READERS = frozenset(
    {*(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "getitem", "neg", "pow"))}
    | {torch.rsqrt, torch.add, torch.mul, torch.cat, torch._C._nn.linear}
)
_READING_METHODS = frozenset({"to", "float", "view", "reshape", "transpose", "pow", "mean", "expand", "contiguous"})


def _storages(
    node: fx.Node, known: Mapping[fx.Node, frozenset[object]], into: tuple[fx.Node, ...]
) -> frozenset[object]:
    exact = _exact(value_of(node))
    if exact is not None and node.target in _IDENTITIES_WHEN_OFF and node.all_input_nodes:
        exact |= known[node.all_input_nodes[0]]
    # What a canonical op returns is memory of its own, whatever else it writes.
    own = not into or find_op(node.target) is not None
    inherited = _NONE if own else _NONE.union(*(known[argument] for argument in into))
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and denies_writes(node.args[0].target):
        inherited |= known[node.args[0]]  # the fake, which follows the schema, calls it memory of its own
    if exact is not None:
        return exact | inherited if exact else exact
    if node.op in ("placeholder", "get_attr"):
        return frozenset({node.target if node.op == "get_attr" else node})
    if _may_alias(node):
        inherited = inherited.union(*(known[argument] for argument in node.all_input_nodes))
    return inherited | {node}


# Switched off they return their input, and a fake value of their own.
_IDENTITIES_WHEN_OFF = frozenset(
    {torch.dropout, functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout}
    | {torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout}
)


def _exact(value: Any) -> frozenset[object] | None:
    """Return the storages of a known value, none for numbers, and None where they can't be read."""
    if value is None:
        return None
    try:
        if isinstance(value, Tensor):
            return frozenset((memory(value),))
        return frozenset(map(memory, tensors(value)))
    except (RuntimeError, NotImplementedError):  # sparse tensors and functorch's wrappers have none
        return None


_FRESH = frozenset(
    {"add", "sub", "mul", "div", "truediv", "floordiv", "neg", "pow", "matmul", "linear", "rsqrt", "sqrt", "exp"}
    | {"sum", "mean", "softmax", "silu", "gelu"}
)
"""Operations that always return memory of their own; of all others an unknown value may be a view of an argument."""


def _may_alias(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", "")).partition(".")[0]
    return name not in _FRESH
