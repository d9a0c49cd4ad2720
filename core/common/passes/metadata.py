"""The fake values of a new op, compared with those of the nodes that it replaces."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from core.common.node_meta import value_of
from core.common.passes.sites import Refused, Site, later_readers
from core.common.passes.values.layouts import flat, same_strides
from core.common.passes.values.recipes import Recipe, call_key, recipe_of
from core.common.passes.values.sizes import same_sizes
from core.common.passes.viewed import mapped, through
from core.common.passes.writes import Writes

Memo = dict[object, Any]
"""Results of fake runs by `call_key`, with the recipes that make them again: the layers of a model are alike."""

ASKS = "asks about a symbolic size"
"""First words of the reason why a site stays: the trace does not determine a size that its new op needs."""


_EQUALITIES: ContextVar[bool] = ContextVar("equalities of sizes are guarded", default=False)


@contextmanager
def equalities_guarded() -> Iterator[None]:
    """Within, a fake run may take symbolic sizes for equal which the first call had equal.

    For backends of Dynamo, which checks before each call whatever its backends have asked: a cache whose keys and
    values have symbols of their own stays attention.
    """
    token = _EQUALITIES.set(True)
    try:
        yield
    finally:
        _EQUALITIES.reset(token)


class Values:
    """The fake values of one site's new nodes."""

    def __init__(self, site: Site, order: Mapping[fx.Node, int], writes: Writes, memo: Memo) -> None:
        self.site, self.order, self.writes, self.memo = site, order, writes, memo

    def compute(self) -> tuple[Mapping[str, Any], Mapping[fx.Node, Any]]:
        """Return the values of the new nodes by name and those of views that change; refuse what differs.

        Equal values keep the old object, so that views of the result still share its memory.
        """
        results = self.site.results
        olds = [None if each is None else each.value for each in results]
        if not _can_run([value_of(node) for node in self.site.inputs]):
            return _given(olds), {}
        args, kwargs = mapped(self.site.args, self.site.kwargs, lambda seen: seen.value)
        inlined = isinstance(self.site.target, fx.GraphModule)
        try:
            values = fake_values(self.site.target, args, kwargs) if inlined else {"": self._like_others(args, kwargs)}
        except NewGuard as error:
            raise Refused(self.site.anchor, f"the new op {error}") from error
        news = _members(values[""], len(olds))
        for result, old, new in zip(results, olds, news, strict=True):
            reason = _differs(old, new)
            if result is not None and reason:
                raise Refused(result.node, f"the new op gives {reason}")
        olds = [new if result is None else old for result, old, new in zip(results, olds, news, strict=True)]
        pairs = zip(olds, news, strict=True)
        if all(isinstance(old, Tensor) and same_strides(old, new) for old, new in pairs):
            return values | _given(olds), {}
        if not inlined:  # values alike belong to another site
            values = {"": self._own(self.site.target, args, kwargs)}
        views: dict[fx.Node, Any] = {}
        for result, old, new in zip(results, olds, _members(values[""], len(olds)), strict=True):
            if result is not None and isinstance(old, Tensor) and not same_strides(old, new):
                views |= self._new_views(result.node, through(new, result.way_back))
        return values, views

    def _like_others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the fake result of a call, made by the recipe of an equal call if there is one."""
        leaves = flat((args, tuple(kwargs.values())))
        return self._known(self.site.target, args, kwargs, leaves)[0]

    def _own(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call in memory of its own, or in that of its arguments."""
        leaves = flat((args, tuple(kwargs.values())))
        recipe = self._known(target, args, kwargs, leaves)[1]
        return fake_values(target, args, kwargs)[""] if recipe is None else recipe.make(leaves)

    def _known(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: list[Any]
    ) -> tuple[Any, Recipe | None]:
        key = call_key(target, args, kwargs, leaves)
        if key not in self.memo:
            value = fake_values(target, args, kwargs)[""]
            self.memo[key] = value, recipe_of(value, leaves)
        known: tuple[Any, Recipe | None] = self.memo[key]
        return known

    def _new_views(self, node: fx.Node, new: Any) -> Mapping[fx.Node, Any]:
        """Where the strides change, run the views of the result on the new ones: a view may be impossible there."""
        known: dict[fx.Node, Any] = {node: new}
        for user in self._views(node):
            args, kwargs = fx.map_arg((user.args, dict(user.kwargs)), lambda n: known.get(n, value_of(n)))
            target: Any = getattr(torch.Tensor, str(user.target)) if user.op == "call_method" else user.target
            try:
                known[user] = self._own(target, args, kwargs)
            except (RuntimeError, ValueError) as error:
                raise Refused(user, f"strides {tuple(new.stride())} do not allow {user.name}: {error}") from error
        del known[node]
        return known

    def _views(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield what is computed from the node without copying, in graph order; the site itself left out."""
        keys, seen = self.writes.of(node), {*node.users, *(user for user, _ in later_readers(self.site, self.order))}
        waiting = [(self.order[user], user) for user in seen]
        heapq.heapify(waiting)
        while waiting:
            _, user = heapq.heappop(waiting)
            computes = user.op.startswith("call_f") or user.op == "call_method"
            if computes and self.writes.of(user) & keys and user not in self.site.nodes:
                yield user
                for following in user.users.keys() - seen:
                    seen.add(following)
                    heapq.heappush(waiting, (self.order[following], following))


def fake_values(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a callable under the fake mode of its arguments; return its result as "", for a graph each node's by name.

    Raises `NewGuard` if the run needs a fact about a symbolic size that the trace does not know: an answer would narrow
    the sizes that the graph serves.
    """
    fakes = (leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, FakeTensor))
    mode = next((fake.fake_mode for fake in fakes), None)
    with torch.no_grad(), _no_guards(mode), mode or nullcontext():
        if not isinstance(target, fx.GraphModule):
            return {"": target(*args, **kwargs)}
        recorder = _Recorder(target)
        result = recorder.run(*args)
    return {"": result} | recorder.values


class NewGuard(RuntimeError):
    """A fake run that would narrow down the sizes that the graph serves; the text says what it does."""


@contextmanager
def _no_guards(mode: FakeTensorMode | None) -> Iterator[None]:
    """Raise `NewGuard` if a guard would be added; on a torch that can't prevent this, after it was added.

    `ShapeEnv.error_on_new_guards` would not do: it raises on guards too that torch itself suppresses.
    """
    shape_env = None if mode is None else mode.shape_env
    if shape_env is None:
        yield
        return

    def refuse(kind: str, guard: object, *_: object, **__: object) -> None:
        if "suppressed" not in kind and not _is_guarded(guard):
            raise NewGuard(f"{ASKS}: {guard}")

    num_guards, known = len(shape_env.guards), vars(shape_env).get("_log_guard")
    vars(shape_env)["_log_guard"] = refuse  # called before a guard is added
    try:
        yield
    finally:
        del vars(shape_env)["_log_guard"]
        if known is not None:
            vars(shape_env)["_log_guard"] = known
    added = [guard.expr for guard in shape_env.guards[num_guards:] if not _is_guarded(guard.expr)]
    if added:
        raise NewGuard(f"{ASKS}: {added[-1]}")


def _is_guarded(guard: Any) -> bool:
    """Tell whether a guard says that two symbolic sizes are equal, and somebody checks that before each call."""
    is_equality = getattr(guard, "rel_op", "") == "=="
    return _EQUALITIES.get() and is_equality and all(side.free_symbols for side in guard.args)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node by name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n.name] = value = super().run_node(n)
        return value


def _can_run(values: list[Any]) -> bool:
    """Tell whether all values are known and fake: real ones would be computed with, and written."""
    if any(value is None for value in values):  # `None in values` would ask each tensor whether it equals None
        return False
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(isinstance(tensor, FakeTensor) for tensor in tensors)


def _given(values: list[Any]) -> dict[str, Any]:
    """Return the values of an op's outputs as those of its call."""
    return {"": values[0] if len(values) == 1 else tuple(values)}


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
    if not same_sizes(old.shape, new.shape):
        return f"shape {tuple(new.shape)} where the graph has {tuple(old.shape)}"
    return ""
