"""Calls that functionalisation wrapped, read off op schemas: what they write, and the calls that do the same in place.

`auto_functionalized` (v1) and `auto_functionalized_v2` wrap a custom op and give its mutated arguments back as further
results; both formats are torch's (torch/_higher_order_ops/auto_functionalize.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import (
    AliasViewInfo,
    AsStridedViewInfo,
    NotView,
    SliceViewInfo,
    auto_functionalized,
    auto_functionalized_v2,
    get_mutable_args,
    read_view_information_from_args,
)
from torch._ops import OpOverload

from core.common.passes import value_of
from core.common.passes.functional.memory import Area
from core.common.passes.values.layouts import memory, tensors

aten = torch.ops.aten
FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One value of which an update makes a new version.

    old: the version before, None for a result buffer that the op only writes. new: the node of the version after, None
    if nothing uses it. parts: the areas written, in old's own storage. index: which mutable argument it is (v1), which
    base (v2) or which result (of an out= op).
    """

    old: fx.Node | None
    new: fx.Node | None
    parts: tuple[Area, ...]
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """A mutable argument of an op: which target it views, and how. view: torch's description of the view."""

    name: str
    base: int
    view: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedCall:
    """A call that functionalisation wrapped. arguments: the mutable ones; a list of them for a list, None for None.

    plain: all other arguments by name. results: how many values the op itself returns. buffers: the wrapped op only
    writes its targets, so the functional graph has no nodes for them.
    """

    op: OpOverload[..., Any]
    plain: Mapping[str, Any]
    arguments: Mapping[str, Any]
    targets: tuple[Target, ...]
    results: int
    buffers: tuple[Mapping[str, Any], ...] = ()


def wrapped_call(node: fx.Node) -> WrappedCall | str:
    """Return the call that an `auto_functionalized` node of either version wraps, or why it must stay wrapped."""
    op, *_ = node.args
    if not isinstance(op, OpOverload):
        return f"{op} is no op with a schema, but a higher-order one"
    read = _read_v1 if node.target is auto_functionalized else _read_v2
    call = read(node, op)
    return call if isinstance(call, str) else _honest(node, call)


def _honest(node: fx.Node, call: WrappedCall) -> WrappedCall | str:
    """Refuse an op that returns an argument's memory although its schema declares new memory."""
    value = value_of(node)
    if not isinstance(value, tuple) or call.buffers:
        return call
    plain: Any = fx.map_arg(tuple(call.plain.values()), value_of)
    given = set(map(memory, tensors((plain, value[call.results or 1 :]))))
    for declared, result in zip(call.op._schema.returns, value, strict=False):
        shares = isinstance(result, Tensor) and memory(result) in given
        if shares and declared.alias_info is None:
            return f"{call.op} returns memory that it was given, which its schema denies: declare it to return nothing"
    return call


def _read_v1(node: fx.Node, op: OpOverload[..., Any]) -> WrappedCall:
    names, _ = get_mutable_args(op)
    results, members = _num_results(op), _members(node)
    targets: list[Target] = []
    arguments: dict[str, Any] = {}

    def add(name: str, old: fx.Node | None, new: fx.Node | None) -> Argument | None:
        if old is None:
            return None
        targets.append(Target(old=old, new=new, parts=_whole(old), index=len(targets)))
        return Argument(name=name, base=len(targets) - 1)

    for position, name in enumerate(names):
        given: Any = node.kwargs[name]
        new = members.get(results + position)
        if isinstance(given, (tuple, list)):
            inner = {} if new is None else _members(new)
            arguments[name] = [add(name, each, inner.get(i)) for i, each in enumerate(given)]
        else:
            arguments[name] = add(name, given, new)
    plain = {name: value for name, value in node.kwargs.items() if name not in names}
    return WrappedCall(op=op, plain=plain, arguments=arguments, targets=tuple(targets), results=len(op._schema.returns))


def _read_v2(node: fx.Node, op: OpOverload[..., Any]) -> WrappedCall | str:
    names, types = get_mutable_args(op)
    kwargs: dict[str, Any] = dict(node.kwargs)
    bases: list[fx.Node] = list(kwargs.pop("_all_bases"))
    members, results = _members(node), _num_results(op)
    if not bases and f"_{names[0]}_size" in kwargs:
        return _read_out(node, op, names, kwargs)
    read: Any = read_view_information_from_args  # works on nodes as well as on tensors
    views = read(names, types, kwargs, bases)
    parts: list[list[Area]] = [[] for _ in bases]

    def argument(name: str, view: Any) -> Argument | None:
        if view is None:
            return None
        area = _viewed(bases[view.base_index], view)
        if area is not None:
            parts[view.base_index].append(area)
        return Argument(name=name, base=view.base_index, view=view)

    arguments = {
        name: [argument(name, each) for each in view] if isinstance(view, list) else argument(name, view)
        for name, view in views.items()
    }
    targets = tuple(
        Target(old=base, new=members.get(results + index), parts=tuple(parts[index]) or _whole(base), index=index)
        for index, base in enumerate(bases)
    )
    return WrappedCall(op=op, plain=kwargs, arguments=arguments, targets=targets, results=len(op._schema.returns))


def _read_out(node: fx.Node, op: OpOverload[..., Any], names: list[str], kwargs: dict[str, Any]) -> WrappedCall:
    """Match an op that only writes its mutable arguments: they are its results, and the graph holds only their
    metadata."""
    keys = ("size", "stride", "dtype", "device")
    buffers = tuple({key: kwargs.pop(f"_{name}_{key}") for key in keys} for name in names)
    members: Mapping[int, fx.Node | None] = {0: node} if len(names) == 1 else _members(node)
    targets = tuple(Target(old=None, new=members.get(i), parts=(), index=i) for i in range(len(names)))
    arguments = {name: Argument(name=name, base=index) for index, name in enumerate(names)}
    return WrappedCall(op=op, plain=kwargs, arguments=arguments, targets=targets, results=0, buffers=buffers)


def _num_results(op: OpOverload[..., Any]) -> int:
    """Return how many results of a wrapped call come before the new versions: one, None, for an op without any."""
    return max(1, len(op._schema.returns))


def _members(node: fx.Node) -> dict[int, fx.Node]:
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]


def _whole(node: fx.Node) -> tuple[Area, ...]:
    area = Area.of(value_of(node))
    return () if area is None else (area,)


def _viewed(base: fx.Node, view: Any) -> Area | None:
    """Return the area of the view that torch describes, in the base's storage."""
    value = value_of(base)
    if not isinstance(value, Tensor):
        return None
    if isinstance(view, AsStridedViewInfo):
        size, stride, offset = (fx.map_arg(each, value_of) for each in (view.size, view.stride, view.storage_offset))
        return Area.at(value, size, stride, offset)
    if not isinstance(view, SliceViewInfo):
        return Area.of(value)
    start, end = (fx.map_arg(each, value_of) for each in (view.start, view.end))
    shape: list[Any] = list(value.shape)
    dim = int(view.dim)
    shape[dim] = end - start
    return Area.at(value, shape, value.stride(), value.storage_offset() + start * value.stride(dim))


def view_call(view: Any, moved: Any = 0) -> tuple[OpOverload[..., Any], tuple[Any, ...]] | None:
    """Return the ATen op, and its arguments after the base, that make a view torch describes; None for the base itself.

    moved: by how many elements the base's storage offset is smaller than that of the base that was described.
    """
    if isinstance(view, SliceViewInfo):
        return aten.slice.Tensor, (view.dim, view.start, view.end)
    if isinstance(view, AsStridedViewInfo):
        offset = view.storage_offset - moved if type(moved) is not int or moved else view.storage_offset
        return aten.as_strided.default, (view.size, view.stride, offset)
    assert view is None or isinstance(view, (AliasViewInfo, NotView))
    return None
