"""The analysis "writes": which storage each node's value lies in, and which nodes write into which storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from core.common.passes.effects import value_of, written_args


@dataclass(frozen=True, slots=True)
class Writes:
    """Which storages each node's value lies in, and which nodes write into which storage, in graph order.

    A storage is a key; a view has the key of its base; holders are the nodes that lie in it. Where values are known
    their storages are compared, so the answer is exact; otherwise whatever can return a view is taken to return one.
    """

    storages: Mapping[fx.Node, frozenset[object]]
    written: Mapping[fx.Node, frozenset[object]]
    holders: Mapping[object, tuple[fx.Node, ...]]

    def of(self, *nodes: fx.Node) -> frozenset[object]:
        """Return the storages in which the values of these nodes lie."""
        return frozenset().union(*(self.storages.get(node, frozenset()) for node in nodes))

    def writers(self, *nodes: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that write into a storage of these nodes, through whatever view."""
        keys = self.of(*nodes)
        return tuple(writer for writer, into in self.written.items() if into & keys)


def find_writes(module: fx.GraphModule) -> Writes:
    """Compute the storages and writes of a graph in one walk."""
    storages: dict[fx.Node, frozenset[object]] = {}
    written: dict[fx.Node, frozenset[object]] = {}
    for node in module.graph.nodes:
        into = written_args(node)
        storages[node] = _storages(node, storages, into)
        keys: frozenset[object] = frozenset().union(*(storages[argument] for argument in into))
        if keys:
            written[node] = keys
    holders: dict[object, list[fx.Node]] = {}
    for node, lies_in in storages.items():
        for key in lies_in:
            holders.setdefault(key, []).append(node)
    return Writes(storages, written, {key: tuple(nodes) for key, nodes in holders.items()})


def _storages(
    node: fx.Node, known: Mapping[fx.Node, frozenset[object]], into: tuple[fx.Node, ...]
) -> frozenset[object]:
    exact = _exact(value_of(node))
    inherited: frozenset[object] = frozenset().union(*(known[argument] for argument in into))
    if exact is not None:
        return exact | inherited if exact else exact
    if node.op in ("placeholder", "get_attr"):
        return frozenset({node.target if node.op == "get_attr" else node})
    if _may_alias(node):
        inherited = inherited.union(*(known[argument] for argument in node.all_input_nodes))
    return inherited | {node}


def _exact(value: Any) -> frozenset[object] | None:
    """Return the storages of a known value, none for numbers, and None where they can't be read."""
    if value is None:
        return None
    tensors = [value] if isinstance(value, Tensor) else list(_tensors(value))
    try:
        return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
    except (RuntimeError, NotImplementedError):  # sparse tensors and functorch's wrappers have none
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


_FRESH = frozenset(
    {"add", "sub", "mul", "div", "truediv", "floordiv", "neg", "pow", "matmul", "linear", "rsqrt", "sqrt", "exp"}
    | {"sum", "mean", "softmax", "silu", "gelu"}
)
"""Operations that always return memory of their own; of all others an unknown value may be a view of an argument."""


def _may_alias(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", "")).partition(".")[0]
    return name not in _FRESH
