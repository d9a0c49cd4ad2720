"""The updates of a functional graph, collected before any of them is judged.

Three kinds. Calls that functionalisation wrapped (core/common/passes/functional/wrapped.py). An ATen op with an
in-place form (`index_put` and `index_put_`) gives a new version of its first argument. A scatter of a view
(`slice_scatter`) returns its first argument with one part replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from core.common.passes import Writes, value_of
from core.common.passes.functional.memory import OWNED, Area
from core.common.passes.functional.wrapped import FUNCTIONALIZED, WrappedCall, wrapped_call
from core.common.passes.writes import find_writes

aten = torch.ops.aten
WAS_IN_PLACE = "core_was_in_place"
"""Key of `node.meta` of functional nodes that the traced graph had as in-place calls
(core/compilation/rewrite/functional.py).
"""
_COPY = torch.ops.aten.copy_.default
VIEWS: Mapping[Any, OpOverload[..., Any]] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
"""Scatters, each with the view of the part that it replaces. torch has no others."""


class Updates:
    """The updates of a graph, collected before any of them is judged."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.writes: Writes = find_writes(module)
        nodes = list(module.graph.nodes)
        self.calls: dict[fx.Node, WrappedCall | str] = {n: wrapped_call(n) for n in nodes if n.target in FUNCTIONALIZED}
        scatters = [n for n in nodes if n.target in VIEWS and len(n.args) > 1]
        self.scatters = {n: area for n in scatters if (area := scattered(n)) is not None}
        self.closing = [n for n in nodes if n.target is _COPY and n.args[0].op in OWNED]
        self.functional = {n for n in nodes if WAS_IN_PLACE in n.meta and in_place_form(n.target) is not None}
        for node in self.closing:
            self._lead(node.args[1], self.writes.of(node.args[0]))

    def _lead(self, node: Any, owner: Collection[object]) -> bool:
        """Note the ATen ops between an input and the value that is copied back into it; return whether there is such a
        chain."""
        chain: list[fx.Node] = []
        while isinstance(node, fx.Node) and not self.writes.of(node) & set(owner):
            if node in self.scatters:
                self._lead(node.args[1], owner)
            elif in_place_form(node.target) is not None:
                chain.append(node)
            elif not self._views(node):
                node = self._version_before(node)
                continue
            node = node.args[0] if node.args else None
        if not isinstance(node, fx.Node):
            return False
        self.functional.update(chain)
        return True

    def _views(self, node: fx.Node) -> bool:
        source = node.args[0] if node.args else None
        return (
            isinstance(source, fx.Node)
            and bool(self.writes.of(node) & self.writes.of(source))
            and (source not in self.calls)
        )

    def _version_before(self, node: fx.Node) -> fx.Node | None:
        source = node.args[0] if node.args else None
        call = self.calls.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(call, WrappedCall):
            return None
        return next((target.old for target in call.targets if target.new is node), None)


@lru_cache(maxsize=4096)
def in_place_form(target: Any) -> OpOverload[..., Any] | None:
    """Return the ATen op that writes the result of a functional one into its first argument; None where there is none.

    Decided by schemas: the same overload of the op named with `_`, the same arguments, the first of them written.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    name = target._schema.name.partition("::")[2]
    packet = getattr(torch.ops.aten, f"{name}_", None)
    form = getattr(packet, target._overloadname, None) if packet is not None else None
    if not isinstance(form, OpOverload) or len(target._schema.returns) != 1:
        return None
    if _taken(target) != _taken(form):
        return None
    written = [each.alias_info is not None and each.alias_info.is_write for each in form._schema.arguments]
    return form if written and written[0] and not any(written[1:]) else None


def _taken(op: OpOverload[..., Any]) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def scattered(node: fx.Node) -> Area | None:
    """Return which part of its first argument a scatter replaces, in that argument's storage; None if unknown."""
    view = VIEWS.get(node.target)
    old = value_of(node.args[0]) if view is not None else None
    if view is None or not isinstance(old, Tensor):
        return None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    named = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    rest = {name: fx.map_arg(named[name], value_of) for name in names[2:] if name in named}
    return _area_of_view(view, old, rest)


def _area_of_view(view: OpOverload[..., Any], old: Tensor, rest: Mapping[str, Any]) -> Area | None:
    """Return the area of a view by arithmetic: running the view on fake tensors would ask about symbolic sizes."""
    shape, stride, offset = list(old.shape), list(old.stride()), old.storage_offset()
    if view is aten.as_strided.default:
        start = rest.get("storage_offset")
        return Area.at(old, rest["size"], rest["stride"], offset if start is None else start)
    if view is aten.diagonal.default:
        return None
    dim = int(rest.get("dim", 0)) % len(shape)
    if view is aten.select.int:
        index = rest["index"]
        if type(index) is not int:
            return None
        index += shape[dim] if index < 0 else 0
        offset += index * stride[dim]
        del shape[dim], stride[dim]
        return Area.at(old, shape, stride, offset)
    bounds = _bounds(shape[dim], rest)
    if bounds is None:
        return None
    step = rest.get("step", 1)
    shape[dim], offset = (bounds[1] - bounds[0] + step - 1) // step, offset + bounds[0] * stride[dim]
    stride[dim] *= step
    return Area.at(old, shape, stride, offset)


def _bounds(size: Any, rest: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return where a slice begins and ends, None if that would add a guard on a symbolic size."""
    start, end = rest.get("start"), rest.get("end")
    start = 0 if start is None else start
    if type(start) is not int:
        return None
    if end is None or (type(end) is int and end >= torch.iinfo(torch.int64).max):
        end = size
    if type(size) is not int:
        whole = start == 0 and end is size
        return (start, end) if whole else None
    if type(end) is not int:
        return None
    start, end = (max(0, min(size, each + size if each < 0 else each)) for each in (start, end))
    return (start, max(start, end))
