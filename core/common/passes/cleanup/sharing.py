"""Which values share memory, kept up to date while nodes are replaced by others whose memory then serves both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.passes import PassContext, Writes, same_size, same_sizes, value_of
from core.common.passes.values.layouts import tensors

_NEVER = -1
_RESHAPING = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "resize_as_", "set_"}
    | {"as_strided_", "detach_"}
)


class Sharing:
    """The memory of a graph's values: which nodes write it and when, and whether the caller owns or receives it.

    One node may replace another if nobody can tell their memory apart. Each replacement joins memory, and later ones
    are judged with the joined memory. So even a series of replacements never puts two outputs into one storage.
    """

    def __init__(self, context: PassContext) -> None:
        self._writes: Writes = context.analysis("writes")
        self._order: Mapping[fx.Node, int] = context.analysis("order")
        self._joined: dict[object, object] = {}
        self._last_write: dict[object, int] = {}
        self._given: set[object] = set()
        self._returned: set[object] = set()
        self.reshaped: set[object] = set()
        for writer, keys in self._writes.written.items():
            self._last_write.update(dict.fromkeys(keys, self._order[writer]))  # in graph order: the last one stays
            if name_of(writer) in _RESHAPING:
                self.reshaped |= keys
        for node in context.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._given |= self._writes.of(node)
            elif node.op == "output":
                self._returned |= self._writes.of(*node.all_input_nodes)

    def of(self, node: fx.Node) -> frozenset[object]:
        """Return the storages of a node, joined ones as one."""
        return frozenset(map(self._root, self._writes.storages.get(node, ())))

    def refusal(self, node: fx.Node, stand_in: fx.Node, since: fx.Node) -> str:
        """Return why the stand-in's memory can't replace the memory that the node allocates, or "".

        The stand-in holds the node's value right after `since`.
        """
        own, other = self.of(node), self.of(stand_in)
        if (own | other) & self.reshaped:
            return "its shape is changed in place"
        if any(self._last_write.get(key, _NEVER) != _NEVER for key in own):
            return "the result is written later"
        if any(self._last_write.get(key, _NEVER) > self._order[since] for key in other):
            return f"{stand_in.name} is written later"
        if own & self._returned and other & (self._returned | self._given):
            return f"it is returned, and must not share memory with {stand_in.name}"
        return ""

    def join(self, node: fx.Node, stand_in: fx.Node) -> None:
        """Record that the stand-in replaces the node."""
        keys = (*self.of(stand_in), *self.of(node))  # none for numbers
        for key in keys[1:]:
            first = self._root(keys[0])
            if key == first:
                continue
            self._joined[key] = first
            self._last_write[first] = max(self._last_write.get(each, _NEVER) for each in (first, key))
            for marked in (self._given, self._returned, self.reshaped):
                if key in marked:
                    marked.add(first)

    def _root(self, key: object) -> object:
        while key in self._joined:
            key = self._joined[key]
        return key


def name_of(node: fx.Node) -> str:
    """Return the bare name of what a node calls, methods and functions alike."""
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", "")).partition(".")[0]


def same_metadata(left: fx.Node, right: fx.Node) -> bool:
    """Tell whether both values are known, plain tensors of one dtype, device, shape and strides, or equal trees."""
    return _alike(value_of(left), value_of(right))


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, (tuple, list)):
        same_kind = type(left) is type(right) and len(left) == len(right)
        return same_kind and all(map(_alike, left, right))
    if not isinstance(left, Tensor):
        return left is not None and type(left) is type(right) and not isinstance(right, Tensor)
    if not (isinstance(left, FakeTensor) and isinstance(right, FakeTensor)):
        return False
    kinds = left.dtype == right.dtype and left.device == right.device and left.layout == right.layout
    return (
        kinds
        and same_sizes(left.shape, right.shape)
        and same_sizes(left.stride(), right.stride())
        and left.is_neg() == right.is_neg()
        and left.is_conj() == right.is_conj()
    )


def same_place(left: fx.Node, right: fx.Node) -> bool:
    """Tell whether two tensors of the same metadata and storage begin at the same element."""
    pairs = zip(tensors(value_of(left)), tensors(value_of(right)), strict=True)
    return all(same_size(a.storage_offset(), b.storage_offset()) for a, b in pairs)
