"""Rewriting a graph by a plan: wrapped calls become calls of their ops, functional ATen ops their in-place forms."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from core.common.node_meta import ORIGIN, value_key
from core.common.passes import MADE_BY, set_value, site_name, value_of
from core.common.passes.functional.memory import Area
from core.common.passes.functional.plan import Plan
from core.common.passes.functional.updates import VIEWS, in_place_form
from core.common.passes.functional.wrapped import Argument, WrappedCall, view_call, wrapped_call
from core.common.passes.metadata import NewGuard, fake_values
from core.common.passes.values.fresh import fresh
from core.common.passes.values.layouts import in_order, same_layout, tensors
from core.common.passes.values.layouts import memory as storage_of

aten = torch.ops.aten
_KEPT = (*ORIGIN, "seq_nr", MADE_BY)


def rewrite_updates(graph: fx.Graph, plan: Plan) -> list[str]:
    """Rewrite every update as planned; return the sites of those that now run in place, in graph order."""
    emitter = _Emitter(graph, plan)
    for node in list(graph.nodes):
        if node in plan.wrapped:
            emitter.unwrap(node)
        elif node in plan.in_place:
            emitter.in_place(node, is_there=plan.in_place[node])
        elif node in plan.scatters:
            emitter.scatter(node, is_there=plan.scatters[node])
        elif node in plan.closing:
            emitter.close(node, drop=plan.closing[node])
    renew_views(graph)
    return emitter.sites


class _Emitter:
    """Inserts the calls in graph order, so that each call reads arguments that are already rewritten."""

    def __init__(self, graph: fx.Graph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._gone: set[fx.Node] = set()
        self.sites: list[str] = []

    def unwrap(self, node: fx.Node) -> None:
        call = wrapped_call(node)
        assert isinstance(call, WrappedCall)
        with self._graph.inserting_before(node):
            bases = [self._base(node, call, index) for index in range(len(call.targets))]
            views: dict[str, Any] = {}
            for name, argument in call.arguments.items():
                if isinstance(argument, (tuple, list)):
                    views[name] = [self._argument(node, call, bases, each) for each in argument]
                else:
                    views[name] = self._argument(node, call, bases, argument)
            args, kwargs = _bound(call.op, {**call.plain, **views})
            made = self._call(node, call.op, args, kwargs, None)
        self._results(node, call, made)
        for target, base in zip(call.targets, bases, strict=True):
            if target.new is not None:
                self._replace(target.new, base)
        self.sites.append(site_name(node))
        self._erase(node)

    def _base(self, node: fx.Node, call: WrappedCall, index: int) -> fx.Node:
        """Return the target of the call: the old value, a copy of it, or a new buffer for a call that only writes."""
        if call.buffers:
            owner = self._plan.buffers.get((node, index))
            return self._buffer(node, call, index) if owner is None else owner
        old = call.targets[index].old
        assert old is not None
        return self._clone(old) if index in self._plan.wrapped[node] else old

    def _buffer(self, node: fx.Node, call: WrappedCall, index: int) -> fx.Node:
        facts = call.buffers[index]
        value = value_of(node)
        value = value[index] if isinstance(value, (tuple, list)) else value
        kwargs = {"dtype": facts["dtype"], "device": facts["device"]}
        return self._call(node, aten.empty_strided.default, (facts["size"], facts["stride"]), kwargs, _anew(value))

    def _clone(self, old: fx.Node) -> fx.Node:
        """Return a copy of the value with the same strides in new memory."""
        value = value_of(old)
        if in_order(value):
            return self._call(old, aten.clone.default, (old,), {}, _anew(value))
        sizes = [self._number(old, aten.sym_size.int, dim, size) for dim, size in enumerate(value.shape)]
        strides = [self._number(old, aten.sym_stride.int, dim, size) for dim, size in enumerate(value.stride())]
        empty = self._call(old, aten.new_empty_strided.default, (old, sizes, strides), {}, _anew(value))
        self._call(old, aten.copy_.default, (empty, old), {}, value_of(empty))
        return empty

    def _number(self, old: fx.Node, op: OpOverload[..., Any], dim: int, value: Any) -> Any:
        return value if type(value) is int else self._call(old, op, (old, dim), {}, value)

    def _argument(self, node: fx.Node, call: WrappedCall, bases: list[fx.Node], argument: Argument | None) -> Any:
        if argument is None:
            return None
        base, target = bases[argument.base], call.targets[argument.base]
        view, area = argument.view, None
        cloned = argument.base in self._plan.wrapped[node] and not call.buffers
        made = view_call(view, value_of(target.old).storage_offset() if cloned else 0)
        if made is None:
            return base
        op, rest = made
        value = _run(op, (base, *rest))
        area = Area.of(value)
        found = None if cloned or area is None else self._existing(node, base, value, area)
        return found or self._call(node, op, (base, *rest), {}, value)

    def _existing(self, node: fx.Node, base: fx.Node, value: Any, area: Area) -> fx.Node | None:
        """Return a node that views the same memory in the same way already, so that the view is not made twice."""
        memory = self._plan.memory
        there = memory.area(base, area)
        for holder in memory.holders(base) if there is not None else ():
            if holder.op != "call_function" or holder in self._gone or not holder < node:
                continue
            if getattr(holder.target, "namespace", "") != "aten" or not same_layout(value_of(holder), value):
                continue
            here = memory.area(holder)
            if here is not None and there is not None and here.is_same(there):
                return holder
        return None

    def _results(self, node: fx.Node, call: WrappedCall, made: fx.Node) -> None:
        """Replace the results that the wrapper passed through by the op's own."""
        if call.buffers:
            return
        value = value_of(node)
        if call.results and isinstance(value, tuple):
            set_value(made, value[0] if call.results == 1 else value[: call.results], node)
        for user in list(node.users):
            if user.target is not operator.getitem or user.args[1] not in range(call.results):
                continue
            if call.results == 1:
                self._replace(user, made)
            else:
                user.args = (made, user.args[1])

    def in_place(self, node: fx.Node, *, is_there: bool) -> None:
        form = in_place_form(node.target)
        old: Any = node.args[0]
        if not is_there:
            with self._graph.inserting_before(node):
                self._call(node, form, node.args, dict(node.kwargs), value_of(old))
        self.sites.append(site_name(node))
        self._replace(node, old)
        self._erase(node)

    def scatter(self, node: fx.Node, *, is_there: bool) -> None:
        old: Any = node.args[0]
        if not is_there:
            # A scatter takes the arguments of its view, and the source.
            args, kwargs = (old, *node.args[2:]), dict(node.kwargs)
            with self._graph.inserting_before(node):
                value = _run(VIEWS[node.target], args, kwargs)
                view = self._call(node, VIEWS[node.target], args, kwargs, value)
                self._call(node, aten.copy_.default, (view, node.args[1]), {}, value)
        self.sites.append(site_name(node))
        self._replace(node, old)
        self._erase(node)

    def close(self, node: fx.Node, *, drop: bool) -> None:
        if not drop:  # the source overlaps what it is copied into
            with self._graph.inserting_before(node):
                node.args = (node.args[0], self._clone(node.args[1]), *node.args[2:])  # type: ignore[arg-type]
            return
        self._replace(node, node.args[0])
        self._erase(node)

    def _call(self, like: fx.Node, op: Any, args: Any, kwargs: Mapping[str, Any], value: Any) -> fx.Node:
        made = self._graph.call_function(op, tuple(args), dict(kwargs))
        made.meta.update({key: like.meta[key] for key in _KEPT if key in like.meta})
        if value is not None:
            set_value(made, value, like)
        return made

    def _replace(self, node: fx.Node, by: Any) -> None:
        self._gone.add(node)
        node.replace_all_uses_with(by)

    def _erase(self, node: fx.Node) -> None:
        for user in list(node.users):
            self._erase(user)
        self._gone.add(node)
        self._graph.erase_node(node)


def _bound(op: OpOverload[..., Any], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by name as the op takes them; those that are last and equal their default are left out."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    num_needed = 0
    for argument in op._schema.arguments:
        value = given.get(argument.name, argument.default_value)
        is_default = not isinstance(value, fx.Node) and argument.has_default_value() and value == argument.default_value
        if argument.kwarg_only:
            kwargs |= {} if is_default else {argument.name: value}
        else:
            args.append(value)
            num_needed = num_needed if is_default else len(args)
    return tuple(args[:num_needed]), kwargs


def _anew(value: Any) -> Any:
    return fresh(value, value.shape, value.stride()) if isinstance(value, FakeTensor) else None


def _run(op: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the fake value of a view, None if the trace does not determine it."""
    fakes = fx.map_arg((tuple(args), dict(kwargs or {})), value_of)
    try:
        return fake_values(op, *fakes)[""]
    except NewGuard:
        return None


def renew_views(graph: fx.Graph) -> None:
    """Recompute the fake values of views, so that they share memory with the nodes that they view after
    replacements."""
    for node in graph.nodes:
        value = value_of(node)
        if node.op != "call_function" or value is None or not _shows(node) or not node.all_input_nodes:
            continue
        sources = set(map(storage_of, tensors([value_of(source) for source in node.all_input_nodes])))
        if set(map(storage_of, tensors(value))) <= sources:
            continue
        renewed = _run(node.target, node.args, node.kwargs)
        if renewed is None:
            del node.meta[value_key(node)]  # no value is safe, a wrong one is not
        else:
            set_value(node, renewed)


def _shows(node: fx.Node) -> bool:
    """Tell whether a node may view an argument, or picks one of several values."""
    if isinstance(node.target, OpOverload):
        return any(each.alias_info is not None for each in node.target._schema.returns)
    return node.target is operator.getitem
