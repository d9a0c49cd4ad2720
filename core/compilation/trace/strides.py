"""Finds where a trace depends on strides that fakes give and a device does not: `Capabilities.keeps_strides`.

Fakes give results of torch's elementwise ops the memory order of their inputs. On a device whose results are contiguous
instead, most of a trace means the same: its ops take any strides, and a view that is not possible raises. Two things
would silently mean something else, and keep a graph from being used:

- `as_strided`, whose numbers a trace takes from the fake;
- a write into such a result by another name. Whether `contiguous` or `reshape` copies depends on strides, so what a
  fake calls two memories may be one, and what it calls one may be two. Passes move reads past writes into other memory.
"""

from __future__ import annotations

from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from core.common.node_meta import value_of
from core.common.ops.declaration import find_op
from core.common.passes.effects import target_name, written_args
from core.common.passes.values.layouts import in_order, same_layout, tensors
from core.common.passes.writes import Writes, find_writes

_BY_STRIDES = frozenset({"as_strided", "as_strided_scatter", "as_strided_copy"})
_PERHAPS_COPIES = frozenset({"contiguous", "reshape", "reshape_as", "flatten", "ravel", "to", "type_as"})
_IN_ORDER = frozenset(
    {"matmul", "linear", "bmm", "mm", "addmm", "baddbmm", "cat", "stack", "embedding", "softmax", "cumsum"}
    | {"layer_norm", "rms_norm"}
)
"""Ops whose results lie in order where the fake's do, whatever the strides of their inputs."""


def stride_dependence(module: fx.GraphModule) -> str:
    """Return how a torch-level graph depends on strides of results of torch's ops, "" where it does not."""
    found = _Loose(find_writes(module))
    return next(filter(None, map(found.add, module.graph.nodes)), "")


class _Loose:
    """Storages whose strides may be others than their fakes', found by a walk in graph order."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self._known: set[object] = set()
        #: Storage -> the node that makes it.
        self._makers: dict[object, fx.Node] = {}
        #: Storages that the device may hold in one, or in several.
        self._copied: set[object] = set()

    def add(self, node: fx.Node) -> str:
        """Take note of a node; return why the graph can't be used, or ""."""
        name = _name(node)
        keys, read = self._writes.of(node), self._writes.of(*node.all_input_nodes) & self._makers.keys()
        if read and name in _BY_STRIDES:
            return f"{node} reads the strides of {self._makers[next(iter(read))]}"
        # A write before a copy means the same whether that copies or not.
        reason = self._written(node) if node in self._writes.written else ""
        fresh = keys - self._known
        self._known |= keys
        if reason or not node.op.startswith("call_") or _is_exact(node):
            return reason
        if fresh and (not _lies_in_order(node) or (read and name not in _IN_ORDER)):
            self._makers |= dict.fromkeys(fresh, node)
        if read and name in _PERHAPS_COPIES and _same_dtype(node):
            self._copied |= read | keys
        return ""

    def _written(self, writer: fx.Node) -> str:
        """Return how a node writes into such memory by another name than its maker's, or ""."""
        for argument in written_args(writer):
            for key in self._writes.of(argument) & self._makers.keys():
                maker = self._makers[key]
                whole = argument is maker or same_layout(value_of(argument), value_of(maker))
                if key in self._copied or not whole:
                    return f"{writer} writes into {argument}, which may share its memory with {maker} or not"
        return ""


def _name(node: fx.Node) -> str:
    name = str(node.target) if node.op == "call_method" else target_name(node.target).partition(".")[0]
    return name.strip("_")


def _is_exact(node: fx.Node) -> bool:
    """Tell whether an op is held to the strides of its fake: a canonical op, and whatever is not torch's own."""
    if find_op(node.target) is not None:
        return True
    return isinstance(node.target, (OpOverload, OpOverloadPacket)) and not str(node.target).startswith("aten.")


def _lies_in_order(node: fx.Node) -> bool:
    return all(map(in_order, tensors(value_of(node))))


def _same_dtype(node: fx.Node) -> bool:
    values = [value_of(each) for each in (node, node.all_input_nodes[0])]
    return not all(isinstance(value, Tensor) for value in values) or values[0].dtype == values[1].dtype
