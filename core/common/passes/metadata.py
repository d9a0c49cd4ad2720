"""What a new op gives: its fake values, compared with those of the nodes that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from core.common.passes.effects import value_of
from core.common.passes.sites import Refused, Site
from core.common.passes.writes import Writes

Memo = dict[object, Any]
"""Results of fake runs by callable and metadata of the arguments: the layers of a model are alike."""


class Values:
    """The fake values of one site's new nodes."""

    def __init__(self, site: Site, order: Mapping[fx.Node, int], writes: Writes, memo: Memo) -> None:
        self.site, self.order, self.writes, self.memo = site, order, writes, memo

    def compute(self) -> tuple[Mapping[str, Any], Mapping[fx.Node, Any]]:
        """Return the values of the new nodes by name and those of views that change; refuse what differs.

        Where they agree the old values are kept: views of the result go on sharing memory with it.
        """
        olds = [value_of(node) for node in self.site.replaced]
        kept = {"": olds[0] if len(olds) == 1 else tuple(olds)}
        if not _can_run([value_of(node) for node in self.site.inputs]):
            return kept, {}
        args, kwargs = fx.map_arg((self.site.args, dict(self.site.kwargs)), value_of)
        inlined = isinstance(self.site.target, fx.GraphModule)
        values = fake_values(self.site.target, args, kwargs) if inlined else self._remembered(args, kwargs)
        news = _members(values[""], len(olds))
        for node, old, new in zip(self.site.replaced, olds, news, strict=True):
            reason = _differs(old, new)
            if reason:
                raise Refused(node, f"the new op gives {reason}")
        pairs = zip(olds, news, strict=True)
        if all(isinstance(old, Tensor) and _same_layout(old, new) for old, new in pairs):
            return values | kept, {}
        if not inlined:  # what is remembered belongs to another site
            values = fake_values(self.site.target, args, kwargs)
        views: dict[fx.Node, Any] = {}
        for node, old, new in zip(self.site.replaced, olds, _members(values[""], len(olds)), strict=True):
            views |= self._new_views(node, old, new)
        return values, views

    def _remembered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        key = (self.site.target, *(_signature(leaf) for leaf in pytree.tree_leaves((args, dict(kwargs)))))
        if key not in self.memo:
            self.memo[key] = fake_values(self.site.target, args, kwargs)
        return dict(self.memo[key])

    def _new_views(self, node: fx.Node, old: Any, new: Any) -> Mapping[fx.Node, Any]:
        """Where the strides change, run the views of the result on the new ones: a view may be impossible there."""
        if not isinstance(old, Tensor) or _same_layout(old, new):
            return {}
        known: dict[fx.Node, Any] = {node: new}
        for user in self._views(node):
            args, kwargs = fx.map_arg((user.args, dict(user.kwargs)), lambda n: known.get(n, value_of(n)))
            target: Any = getattr(torch.Tensor, str(user.target)) if user.op == "call_method" else user.target
            try:
                known[user] = fake_values(target, args, kwargs)[""]
            except (RuntimeError, ValueError) as error:
                raise Refused(user, f"strides {tuple(new.stride())} do not allow {user.name}: {error}") from error
        del known[node]
        return known

    def _views(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield what is computed from the node without copying, in graph order; the site itself left out."""
        keys, reached = self.writes.of(node), {node}
        for user in self.order:
            if user.op.startswith("call_f") or user.op == "call_method":
                from_it = any(argument in reached for argument in user.all_input_nodes)
                if from_it and self.writes.of(user) & keys and user not in self.site.nodes:
                    reached.add(user)
                    yield user


def fake_values(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a callable under the fake mode of its arguments; return its result as "", for a graph each node's by name."""
    fakes = (leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, FakeTensor))
    mode = next((fake.fake_mode for fake in fakes), None)
    with torch.no_grad(), mode or nullcontext():
        if not isinstance(target, fx.GraphModule):
            return {"": target(*args, **kwargs)}
        recorder = _Recorder(target)
        result = recorder.run(*args)
    return {"": result} | recorder.values


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node by name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n.name] = value = super().run_node(n)
        return value


def _signature(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.device, _sizes(value.shape), _sizes(value.stride())
    return type(value), repr(value)


def _sizes(sizes: Any) -> tuple[object, ...]:
    """Return sizes that can be compared without asking about symbols."""
    return tuple(size if type(size) is int else str(size) for size in sizes)


def _can_run(values: list[Any]) -> bool:
    """Tell whether all values are known and fake: real ones would be computed with, and written."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return None not in values and bool(tensors) and all(isinstance(tensor, FakeTensor) for tensor in tensors)


def _members(value: Any, count: int) -> tuple[Any, ...]:
    members = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return members if len(members) == count else (None,) * count


def _differs(old: Any, new: Any) -> str:
    if not isinstance(old, Tensor):
        return ""
    if not isinstance(new, Tensor):
        return f"{type(new).__name__} instead of a tensor"
    if new.dtype != old.dtype:
        return f"{new.dtype} where the graph has {old.dtype}"
    if new.device != old.device:
        return f"a tensor on {new.device} where the graph has {old.device}"
    return "" if _same(old.shape, new.shape) else f"shape {tuple(new.shape)} where the graph has {tuple(old.shape)}"


def _same_layout(old: Tensor, new: Tensor) -> bool:
    """Tell whether two tensors of one shape lie alike in memory; the stride of a single element means nothing."""
    kept = [dim for dim, size in enumerate(old.shape) if type(size) is not int or size != 1]
    return _same([old.stride(dim) for dim in kept], [new.stride(dim) for dim in kept])


def _same(left: Any, right: Any) -> bool:
    if len(left) != len(right):
        return False
    return all(a is b or statically_known_true(a == b) for a, b in zip(left, right, strict=True))
