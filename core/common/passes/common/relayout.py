"""What changes in a graph's fake values when some of its tensors get other strides: views, and what follows strides."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.passes.common.fresh import fresh, reread
from core.common.passes.context import value_of
from core.common.passes.metadata import fake_values
from core.common.passes.sites import Refused

Signature = tuple[object, ...]
_OWN = -1  # in place of the argument that a result is a view of: it has memory of its own


class Relayout:
    """Reruns the fakes of what depends on changed values, as far as anything changes. One per graph.

    The layers of a model are alike: what a call did to its arguments' metadata is remembered and done again.
    """

    def __init__(self, order: Mapping[fx.Node, int]) -> None:
        self._order = order
        self._results: dict[Signature, tuple[int, Any, Any, Any] | None] = {}

    def consequences(self, changed: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the new values of all nodes that change, the given ones included.

        Raises `Refused` at a node that can't compute on the new strides. Nothing in the graph changes.
        """
        new = dict(changed)
        left = {_memory(leaf) for node in changed for leaf in _tensors(value_of(node))}
        waiting = [(self._order[user], user) for node in changed for user in node.users]
        heapq.heapify(waiting)
        seen: set[fx.Node] = set()
        while waiting:
            _, node = heapq.heappop(waiting)
            if node in seen or node.op == "output":
                continue
            seen.add(node)
            value = self._value(node, new, left)
            if value is not None:
                new[node] = value
                left.update(_memory(leaf) for leaf in _tensors(value_of(node)))
                for user in node.users:
                    heapq.heappush(waiting, (self._order[user], user))
        return new

    def _value(self, node: fx.Node, new: Mapping[fx.Node, Any], left: set[int]) -> Any:
        """Return the node's value on the new ones, None where it stays as it is."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: new[n] if n in new else value_of(n))
        leaves = _flat((args, tuple(kwargs.values())))
        memories = [_memory(leaf) if isinstance(leaf, FakeTensor) else None for leaf in leaves]
        old = value_of(node)
        moved = any(_memory(leaf) in left for leaf in _tensors(old))
        form = (node.op, node.target, moved, _form(args), tuple(kwargs), *map(memories.index, memories))
        key = (form, *map(_signature, _flat(old)), *map(_signature, leaves))
        if key in self._results:
            known = self._results[key]
            if known is None:
                return None
            index, shape, stride, offset = known
            if index == _OWN:
                return fresh(old, shape, stride)
            return reread(leaves[index], shape, stride, leaves[index].storage_offset() + offset)
        value = self._run(node, args, kwargs)
        same = [_signature(leaf) for leaf in _flat(value)] == [_signature(leaf) for leaf in _flat(old)]
        if isinstance(value, FakeTensor) and _memory(value) in memories:
            index = memories.index(_memory(value))
            if not (same and not moved):
                offset = value.storage_offset() - leaves[index].storage_offset()
                self._results[key] = (index, tuple(value.shape), tuple(value.stride()), offset)
                return value
        if same and not moved:
            self._results[key] = None
            return None
        if isinstance(value, FakeTensor) and isinstance(old, FakeTensor) and value.dtype == old.dtype:
            self._results[key] = (_OWN, tuple(value.shape), tuple(value.stride()), 0)
        return value

    @staticmethod
    def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
        try:
            return fake_values(target, args, kwargs)[""]
        except Exception as error:  # whatever a kernel's checks raise
            text = str(error).partition("\n")[0]
            raise Refused(node, f"{node.name} can't compute on a slice of a wider result: {text}") from error


def _flat(value: Any) -> list[Any]:
    if not isinstance(value, (tuple, list)):
        return [value]
    leaves: list[Any] = []
    for item in value:
        leaves += _flat(item) if isinstance(item, (tuple, list)) else (item,)
    return leaves


def _form(value: Any) -> object:
    """Return how arguments are nested: `x[0, 1]` and `x[[0, 1]]` hold the same leaves."""
    return (type(value), *map(_form, value)) if isinstance(value, (tuple, list)) else None


def _tensors(value: Any) -> list[FakeTensor]:
    return [leaf for leaf in _flat(value) if isinstance(leaf, FakeTensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _signature(value: Any) -> Signature:
    if isinstance(value, Tensor):
        return value.dtype, value.device, str(tuple(value.shape)), str(tuple(value.stride()))
    return type(value), repr(value)
